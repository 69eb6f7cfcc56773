"""From the images of a body to checked files, as far as they can be told without the model.

Base64, kind of file, size and number are checked here, before anything is generated. The
worker that runs a prompt decodes its images and fits them to the placeholders: only it has
the model's processor (`workers/images/preparer.py`).
"""

import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import gevent
import msgspec
import numpy as np

from app.schemas.generation import GenerateBody, SamplingBody, TokensPrompt
from titopool.errors import ImageMismatch, InvalidImage, InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.wire.image_files import check_file
from titopool.wire.messages import Image, ImageFacts, WorkerFacts

# What an image counts for at least: models scale small ones up.
MIN_IMAGE_PIXELS = 256 * 256
_DATA_URL = re.compile(r"data:[\w.+-]*/[\w.+-]*;base64,")
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt, and what the model's processor is told."""

    images: list[Image] = field(default_factory=list)
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def digests(self) -> list[bytes]:
        return [image.digest for image in self.images]


NO_IMAGES = PromptImages()


@dataclass(frozen=True)
class EncodedImages:
    """The images of one prompt as they came, and where prompt and images stood in the body."""

    prompt: str
    place: str
    files: list[str]
    # Whether they came in a list.
    is_list: bool
    mm_processor_kwargs: dict[str, Any]


def images_of(body: GenerateBody, facts: WorkerFacts, config: ServerConfig) -> list[PromptImages]:
    """The images of each prompt of `POST /generate/`; raises what `read_images` does."""
    has_objects = isinstance(body.prompts[0], TokensPrompt)
    if not has_objects and not body.images and not body.mm_processor_kwargs:
        return [NO_IMAGES] * len(body.prompts)
    return [read_images(one, body, facts, config) for one in _encoded(body)]


def read_images(
    encoded: EncodedImages, body: SamplingBody, facts: WorkerFacts, config: ServerConfig
) -> PromptImages:
    """The images of one prompt.

    Raises:
        InvalidImage: one is no image file, or they are too large.
        ImageMismatch: there are more than the model takes.
        InvalidRequest: an argument for the processor is not allowed.
    """
    _check_kwargs(encoded.mm_processor_kwargs, encoded.prompt, config)
    if not encoded.files:
        return NO_IMAGES
    _check_number(len(encoded.files), encoded.place, facts)
    _refuse_truncation(body)
    images = _read(encoded, config.max_image_pixels)
    return PromptImages(images, encoded.mm_processor_kwargs)


def _read(encoded: EncodedImages, max_pixels: int) -> list[Image]:
    kwargs = encoded.mm_processor_kwargs
    least = max(MIN_IMAGE_PIXELS, kwargs.get("min_pixels", 0))
    of_kwargs = blake2b(_encode_sorted(kwargs), digest_size=16).digest()
    images, num_pixels = [], 0
    for number, text in enumerate(encoded.files):
        place = f"{encoded.place}[{number}]" if encoded.is_list else encoded.place
        data = _decode_base64(text, place)
        try:
            width, height = check_file(data)
        except ValueError as error:
            raise InvalidImage(f"{place}: {error}", param=_field_at(place)) from None
        num_pixels += max(least, width * height)
        if num_pixels > max_pixels:
            raise InvalidImage(
                f"{place}: expected at most {max_pixels} pixels in the images of a prompt "
                f"(max_image_pixels), got {num_pixels} with this one of {width} x {height}; scale "
                f"them down (each counts for {least} at least)",
                param=_field_at(place),
            )
        images.append(Image(data, blake2b(data, digest_size=16, salt=of_kwargs).digest()))
        # Milliseconds for each image: other requests take their turn.
        gevent.sleep(0)
    return images


def check_placeholders(
    prompt_ids: Sequence[np.ndarray],
    prompts: Sequence[PromptImages],
    places: Sequence[str],
    facts: ImageFacts | None,
) -> None:
    """Refuses images without placeholders and placeholders without images.

    Whether the number of placeholders is the right one depends on the sizes of the images,
    which the worker looks at. `places` are those of the prompts in the client's body.
    """
    if facts is None:
        return
    for ids, prompt, place in zip(prompt_ids, prompts, places, strict=True):
        num_images = len(prompt.images)
        num_placeholders = int(np.isin(ids, facts.placeholder_ids).sum())
        if num_images == 0 and num_placeholders:
            raise ImageMismatch(
                f"{place}: expected no placeholders (token ids {facts.placeholder_ids}) in "
                f"a prompt with 0 images, got {num_placeholders}; send its images",
                param="images",
            )
        if facts.has_placeholders and num_placeholders < num_images:
            raise ImageMismatch(
                f"{place}: expected a placeholder (token ids {facts.placeholder_ids}) for "
                f"each of its {num_images} images, got {num_placeholders}",
                param="images",
            )


def _encoded(body: GenerateBody) -> Iterator[EncodedImages]:
    for name in ("images", "mm_processor_kwargs"):
        check_one_per_prompt(getattr(body, name), len(body.prompts), name)
    for index, prompt in enumerate(body.prompts):
        own = prompt if isinstance(prompt, TokensPrompt) else TokensPrompt([])
        inside = own.multi_modal_data.image if own.multi_modal_data else None
        beside = body.images[index] if body.images else None
        if inside and beside:
            raise InvalidRequest(
                f"images[{index}]: expected null, as prompts[{index}].multi_modal_data has images",
                param="images",
            )
        files = inside or beside or []
        is_list = isinstance(files, list)
        yield EncodedImages(
            prompt=f"prompts[{index}]",
            place=f"prompts[{index}].multi_modal_data.image" if inside else f"images[{index}]",
            files=files if isinstance(files, list) else [files],
            is_list=is_list,
            mm_processor_kwargs=processor_kwargs_of(body, index, own.mm_processor_kwargs),
        )


def check_one_per_prompt(value: object, num_prompts: int, name: str) -> None:
    """Refuses a list that has not one entry for each prompt."""
    if isinstance(value, list) and len(value) != num_prompts:
        raise ImageMismatch(
            f"{name}: expected an entry for each of the {num_prompts} prompts (null for one "
            f"without), got {len(value)}",
            param=name,
        )


def processor_kwargs_of(
    body: SamplingBody, index: int, own: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What the processor is told for prompt `index`: its own arguments, else the request's."""
    beside = body.mm_processor_kwargs
    if isinstance(beside, list):
        beside = beside[index]
    return (beside if own is None else own) or {}


def _check_number(num_images: int, place: str, facts: WorkerFacts) -> None:
    if facts.images is None:
        raise ImageMismatch(
            f"{place}: expected no images, as {facts.model} is served for token ids only, got "
            f"{num_images}",
            param=_field_at(place),
        )
    if num_images > facts.images.max_images:
        raise ImageMismatch(
            f"{place}: expected at most {facts.images.max_images} images in a prompt "
            f"(--limit-mm-per-prompt), got {num_images}",
            param=_field_at(place),
        )


def _refuse_truncation(body: SamplingBody) -> None:
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: expected null in a request with images, whose placeholders "
            f"it could cut through, got {body.truncate_prompt_tokens}",
            param="truncate_prompt_tokens",
        )


def _check_kwargs(kwargs: dict[str, Any], place: str, config: ServerConfig) -> None:
    for name, value in kwargs.items():
        if name not in config.mm_processor_kwargs:
            raise InvalidRequest(
                f"{place}: mm_processor_kwargs: expected one of "
                f"{', '.join(config.mm_processor_kwargs)} (the server's setting "
                f"mm_processor_kwargs), got {name!r}",
                param="mm_processor_kwargs",
            )
        for number in _numbers(value):
            if not 0 <= number <= config.max_image_pixels:
                raise InvalidRequest(
                    f"{place}: mm_processor_kwargs.{name}: expected numbers from 0 to "
                    f"{config.max_image_pixels} (max_image_pixels), got {number}",
                    param="mm_processor_kwargs",
                )
    least, most = kwargs.get("min_pixels", 1), kwargs.get("max_pixels", config.max_image_pixels)
    if type(least) is not int or type(most) is not int or not 0 < least <= most:
        raise InvalidRequest(
            f"{place}: mm_processor_kwargs: expected whole numbers with 0 < min_pixels <= "
            f"max_pixels, got {least!r} and {most!r}",
            param="mm_processor_kwargs",
        )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield value


def _decode_base64(text: str, place: str) -> bytes:
    if re.match(r"\w{1,10}://", text):
        raise InvalidImage(
            f"{place}: expected an image in base64, got a URL; the server fetches none: send the "
            "file's bytes",
            param=_field_at(place),
        )
    header = _DATA_URL.match(text)
    try:
        return binascii.a2b_base64(text[header.end() :] if header else text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidImage(
            f"{place}: expected an image in base64, got {_shown(text)} ({error})",
            param=_field_at(place),
        ) from None


def _field_at(place: str) -> str:
    """The body's field in which an image stands: images also come in prompts and messages."""
    return re.split(r"\W", place, maxsplit=1)[0]


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}…"
