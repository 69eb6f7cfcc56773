"""Turns the images of a body into checked image files, without the model.

Base64, file type, size and number are checked here, before any prompt of the request generates.
The worker decodes a prompt's images and matches them to the placeholders, because only workers
have the model's processor (`workers/images/preparer.py`). The checks run in a thread of their own,
one image after the other, so that other requests wait for none of them.
"""

import binascii
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

import gevent
import msgspec
import numpy as np

from app.http.connections import current_client
from app.inputs.turns import Turns
from app.time_slices import sharing_time
from titopool.errors import ImageMismatch, InvalidImage, InvalidRequest, NoReadyWorker
from titopool.settings.config import ServerConfig
from titopool.wire.image_files import check_file
from titopool.wire.messages import Image, ImageFacts, WorkerFacts

# Smaller images count as this many pixels: models scale them up.
MIN_IMAGE_PIXELS = 256 * 256
_DATA_URL = re.compile(r"data:[\w.+-]*/[\w.+-]*;base64,")
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
Result = TypeVar("Result")
# Bytes of a file that take as long as a character of a text in the tokenizer.
BYTES_PER_SIZE = 100
# How long an image waits for the thread.
TURN_TIMEOUT_S = 60.0
_turns = Turns()


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt, and the arguments for the model's processor."""

    images: list[Image] = field(default_factory=list)
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    # As `titopool.wire.messages.Job.image_ranges`.
    ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def digests(self) -> list[bytes]:
        return [image.digest for image in self.images]


NO_IMAGES = PromptImages()


@dataclass(frozen=True)
class EncodedImages:
    """The images of one prompt as the client sent them, in base64 or as data: URLs."""

    # Locations of the prompt and of its images in the client's body.
    prompt: str
    location: str
    files: list[str]
    # Whether the client sent a list, so that an image's location has an index.
    is_list: bool
    mm_processor_kwargs: dict[str, Any]


def read_images(
    encoded: EncodedImages,
    facts: WorkerFacts,
    config: ServerConfig,
    *,
    truncated_to: int | None = None,
) -> PromptImages:
    """The images of one prompt.

    Args:
        truncated_to: the body's `truncate_prompt_tokens`.

    Raises:
        InvalidImage: an image is no image file, or the images are too large.
        ImageMismatch: there are more images than the model accepts.
        InvalidRequest: an argument for the processor is not allowed or out of range.
    """
    _check_kwargs(encoded.mm_processor_kwargs, encoded.prompt, config)
    if not encoded.files:
        return NO_IMAGES
    _check_number(len(encoded.files), encoded.location, facts)
    _refuse_truncation(truncated_to)
    images = _read(encoded, config.max_image_pixels)
    return PromptImages(images, encoded.mm_processor_kwargs)


def _read(encoded: EncodedImages, max_pixels: int) -> list[Image]:
    kwargs = encoded.mm_processor_kwargs
    min_pixels = max(MIN_IMAGE_PIXELS, kwargs.get("min_pixels", 0))
    salt = blake2b(_encode_sorted(kwargs), digest_size=16).digest()
    images, num_pixels = [], 0
    for number, text in enumerate(encoded.files):
        location = f"{encoded.location}[{number}]" if encoded.is_list else encoded.location
        image, (width, height) = in_image_thread(_check, text, location, salt, size=len(text))
        num_pixels += max(min_pixels, width * height)
        if num_pixels > max_pixels:
            raise InvalidImage(
                f"{location}: expected at most {max_pixels} pixels in all images of a prompt "
                f"(max_image_pixels), got {num_pixels} with this image of {width} x {height}; "
                f"scale the images down (each counts as {min_pixels} pixels at least)",
                param=_field_at(location),
            )
        images.append(image)
    return images


def in_image_thread(function: Callable[..., Result], *arguments: Any, size: int) -> Result:
    """What `function(*arguments)` returns or raises.

    Args:
        size: bytes of the arguments.

    Raises:
        ClientGone: the client of the current request has hung up.
        NoReadyWorker: the images of other requests took `TURN_TIMEOUT_S`.
    """
    busy = NoReadyWorker("the images of other requests are still being checked; try again later")
    with gevent.Timeout(TURN_TIMEOUT_S, busy):
        return _turns.call(
            function, *arguments, size=size // BYTES_PER_SIZE, client=current_client()
        )


def _check(text: str, location: str, salt: bytes) -> tuple[Image, tuple[int, int]]:
    """An image with its digest, and its width and height."""
    data = _decode_base64(text, location)
    try:
        shape = check_file(data)
    except ValueError as error:
        raise InvalidImage(f"{location}: {error}", param=_field_at(location)) from None
    return Image(data, blake2b(data, digest_size=16, salt=salt).digest()), shape


def check_placeholders(
    prompt_ids: Sequence[np.ndarray],
    prompts: Sequence[PromptImages],
    locations: Sequence[str],
    facts: ImageFacts | None,
) -> None:
    """Refuses images without placeholders, and placeholders without images.

    The right number of placeholders depends on the images' sizes, so the worker checks it.

    Args:
        prompt_ids: int32 [tokens] of each prompt.
        locations: locations of the prompts in the client's body.
        facts: None for a model without images: nothing is checked.

    Raises:
        ImageMismatch: see above.
    """
    if facts is None:
        return
    for ids, prompt, location in sharing_time(zip(prompt_ids, prompts, locations, strict=True)):
        num_images = len(prompt.images)
        num_placeholders = int(np.isin(ids, facts.placeholder_ids).sum())
        if num_images == 0 and num_placeholders:
            raise ImageMismatch(
                f"{location}: expected no placeholders (token ids {facts.placeholder_ids}) in "
                f"a prompt with 0 images, got {num_placeholders}; send its images",
                param="images",
            )
        if facts.has_placeholders and num_placeholders < num_images:
            raise ImageMismatch(
                f"{location}: expected a placeholder (token ids {facts.placeholder_ids}) for "
                f"each of its {num_images} images, got {num_placeholders}",
                param="images",
            )


def _check_number(num_images: int, location: str, facts: WorkerFacts) -> None:
    if facts.images is None:
        raise ImageMismatch(
            f"{location}: expected no images, as {facts.model} accepts no images, got {num_images}",
            param=_field_at(location),
        )
    if facts.images.refused_because:
        raise ImageMismatch(
            f"{location}: expected no images, because {facts.images.refused_because}; "
            f"got {num_images}",
            param=_field_at(location),
        )
    if num_images > facts.images.max_images:
        raise ImageMismatch(
            f"{location}: expected at most {facts.images.max_images} images in a prompt "
            f"(--limit-mm-per-prompt), got {num_images}",
            param=_field_at(location),
        )


def _refuse_truncation(truncated_to: int | None) -> None:
    if truncated_to is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: expected null in a request with images, as truncation "
            f"could cut placeholders off, got {truncated_to}",
            param="truncate_prompt_tokens",
        )


def _check_kwargs(kwargs: dict[str, Any], location: str, config: ServerConfig) -> None:
    for name, value in kwargs.items():
        if name not in config.mm_processor_kwargs:
            raise InvalidRequest(
                f"{location}: mm_processor_kwargs: expected one of "
                f"{', '.join(config.mm_processor_kwargs)} (the server's setting "
                f"mm_processor_kwargs), got {name!r}",
                param="mm_processor_kwargs",
            )
        for number in _numbers(value):
            if not 0 <= number <= config.max_image_pixels:
                raise InvalidRequest(
                    f"{location}: mm_processor_kwargs.{name}: expected numbers from 0 to "
                    f"{config.max_image_pixels} (max_image_pixels), got {number}",
                    param="mm_processor_kwargs",
                )
    low, high = kwargs.get("min_pixels", 1), kwargs.get("max_pixels", config.max_image_pixels)
    if type(low) is not int or type(high) is not int or not 0 < low <= high:
        raise InvalidRequest(
            f"{location}: mm_processor_kwargs: expected whole numbers with 0 < min_pixels <= "
            f"max_pixels, got {low!r} and {high!r}",
            param="mm_processor_kwargs",
        )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield value


def _decode_base64(text: str, location: str) -> bytes:
    if re.match(r"\w{1,10}://", text):
        raise InvalidImage(
            f"{location}: expected an image in base64, got a URL; the server does not fetch URLs: "
            "send the file's bytes",
            param=_field_at(location),
        )
    header = _DATA_URL.match(text)
    try:
        return binascii.a2b_base64(text[header.end() :] if header else text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidImage(
            f"{location}: expected an image in base64, got {_shown(text)} ({error})",
            param=_field_at(location),
        ) from None


def _field_at(location: str) -> str:
    """The top-level field of a location, e.g. `images` or `messages`."""
    return re.split(r"\W", location, maxsplit=1)[0]


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}…"
