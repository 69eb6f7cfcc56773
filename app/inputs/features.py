"""vLLM's features of images: the fields of bodies and answers, and files as features.

vLLM's features are tensors. Here they are the file that the client sent, so that no tensor from
outside reaches the model, and the images take the way of all others.
"""

from base64 import b64encode
from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.inputs.images import in_image_thread
from titopool.wire.messages import Image

# Begins an entry of `kwargs_data`; the image's file in base64 follows.
IMAGE_PREFIX = "titopool-image:1:"
Position = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class PlaceholderRange(msgspec.Struct, forbid_unknown_fields=True):
    """Where an image's placeholders stand in `token_ids`, in tokens."""

    offset: Position
    length: Length


class Hashes(msgspec.Struct, forbid_unknown_fields=True):
    """sha256 of each file, as hexadecimal digits."""

    image: list[str]


class Placeholders(msgspec.Struct, forbid_unknown_fields=True):
    """The place of each image."""

    image: list[PlaceholderRange]


class Data(msgspec.Struct, forbid_unknown_fields=True):
    """The file of each image. In vLLM's server tensors; null: an image in the server's cache."""

    image: list[str | None]


class Features(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's MultiModalFeatures of images: lists with an entry for each image."""

    mm_hashes: Hashes
    mm_placeholders: Placeholders
    kwargs_data: Data | None = None
    # Of vLLM's transfers between servers.
    mm_metadata: None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """An image that belongs to the next placeholder in `token_ids`."""

    type: Literal["image_url"]
    # A data: URL.
    url: str
    # The client's name of the image. The server names an image by its file.
    uuid: str | None = None


def features_object(
    hashes: list[str], ranges: list[tuple[int, int]], files: list[str]
) -> dict[str, Any]:
    """`Features` of images, for an answer; `files` are in base64."""
    return {
        "mm_hashes": {"image": hashes},
        "mm_placeholders": placeholders_object(ranges),
        "kwargs_data": {"image": [IMAGE_PREFIX + one for one in files]},
        "mm_metadata": None,
    }


def placeholders_object(ranges: list[tuple[int, int]]) -> dict[str, Any]:
    """`mm_placeholders` of images, for an answer."""
    return {"image": [{"offset": offset, "length": length} for offset, length in ranges]}


def features_of(images: list[Image], ranges: list[tuple[int, int]]) -> dict[str, Any]:
    """The features of a prompt's images, as `/inference/v1/generate` reads them.

    Args:
        ranges: offset and length of each image in the prompt.
    """
    hashes, files = [], []
    for one in images:
        hashes.append(in_image_thread(hash_of, one.data, size=len(one.data)))
        files.append(b64encode(one.data).decode())
    return features_object(hashes, ranges, files)


def hash_of(file: bytes) -> str:
    """An image's entry in `mm_hashes`."""
    return sha256(file).hexdigest()
