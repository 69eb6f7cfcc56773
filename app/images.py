"""From the images of a body to checked files, as far as they can be told without the model.

Base64, kind of file, size and number are checked here, before anything is generated. The
worker that runs a prompt decodes its images and fits them to the placeholders: only it has
the model's processor (`workers/images.py`).
"""

import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from io import BytesIO
from typing import Any

import gevent
import msgspec
import numpy as np
import PIL.Image

from app.schemas import GenerateBody, TokensPrompt
from titopool.config import ServerConfig
from titopool.errors import ImageMismatch, InvalidImage, InvalidRequest
from titopool.messages import Image, ImageFacts, WorkerFacts

# What Pillow reads here; its other formats are old, rare, or run other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Of the longer side to the shorter. Qwen's processors refuse more, and those that scale the
# shorter side to a fixed length would make an image of gigabytes.
MAX_ASPECT_RATIO = 200
_DATA_URL = re.compile(r"data:[\w.+-]*/[\w.+-]*;base64,")
_digest_order = msgspec.json.Encoder(order="sorted")

# The check below comes first and names the setting.
PIL.Image.MAX_IMAGE_PIXELS = None


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
class _Encoded:
    """The images of one prompt as they came, and where they stood."""

    place: str
    files: list[str]
    # Whether they came in a list.
    is_list: bool
    mm_processor_kwargs: dict[str, Any]


def images_of(body: GenerateBody, facts: WorkerFacts, config: ServerConfig) -> list[PromptImages]:
    """The images of each prompt.

    Raises:
        InvalidImage: one is no image file, or too large.
        ImageMismatch: a prompt has more than the model takes; `images` is of another length
            than `prompts`.
        InvalidRequest: an argument for the processor is not allowed.
    """
    if (
        not isinstance(body.prompts[0], TokensPrompt)
        and not body.images
        and not body.mm_processor_kwargs
    ):
        return [NO_IMAGES] * len(body.prompts)
    found = []
    for index, encoded in enumerate(_encoded(body)):
        _check_kwargs(encoded.mm_processor_kwargs, f"prompts[{index}]", config)
        if encoded.files:
            _check_number(len(encoded.files), encoded.place, facts)
            _refuse_truncation(body)
        salt = _digest_order.encode(encoded.mm_processor_kwargs)
        images = []
        for number, text in enumerate(encoded.files):
            place = f"{encoded.place}[{number}]" if encoded.is_list else encoded.place
            data = _decode_base64(text, place)
            check_file(data, place, config.max_image_pixels)
            images.append(Image(data, blake2b(data, digest_size=16, salt=_short(salt)).digest()))
            # Milliseconds for each image: other requests take their turn.
            gevent.sleep(0)
        found.append(PromptImages(images, encoded.mm_processor_kwargs if images else {}))
    return found


def check_placeholders(
    prompt_ids: Sequence[np.ndarray], prompts: Sequence[PromptImages], facts: ImageFacts | None
) -> None:
    """Refuses images without placeholders and placeholders without images.

    Whether the number of placeholders is the right one depends on the sizes of the images,
    which the worker looks at.
    """
    if facts is None:
        return
    for index, (ids, prompt) in enumerate(zip(prompt_ids, prompts, strict=True)):
        num_images = len(prompt.images)
        num_placeholders = int(np.isin(ids, facts.placeholder_ids).sum())
        if num_images == 0 and num_placeholders:
            raise ImageMismatch(
                f"prompts[{index}]: expected no placeholders (token ids {facts.placeholder_ids}) in "
                f"a prompt with 0 images, got {num_placeholders}; send its images",
                param="images",
            )
        if facts.has_placeholders and num_placeholders < num_images:
            raise ImageMismatch(
                f"prompts[{index}]: expected a placeholder (token ids {facts.placeholder_ids}) for "
                f"each of its {num_images} images, got {num_placeholders}",
                param="images",
            )


def _encoded(body: GenerateBody) -> Iterator[_Encoded]:
    num_prompts = len(body.prompts)
    for name in ("images", "mm_processor_kwargs"):
        value = getattr(body, name)
        if isinstance(value, list) and len(value) != num_prompts:
            raise ImageMismatch(
                f"{name}: expected an entry for each of the {num_prompts} prompts (null for one "
                f"without), got {len(value)}",
                param=name,
            )
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
        yield _Encoded(
            place=f"prompts[{index}].multi_modal_data.image" if inside else f"images[{index}]",
            files=files if isinstance(files, list) else [files],
            is_list=is_list,
            mm_processor_kwargs=_kwargs_of(body, own, index),
        )


def _kwargs_of(body: GenerateBody, own: TokensPrompt, index: int) -> dict[str, Any]:
    """The prompt's own, else the request's."""
    beside = body.mm_processor_kwargs
    if isinstance(beside, list):
        beside = beside[index]
    return (beside if own.mm_processor_kwargs is None else own.mm_processor_kwargs) or {}


def _check_number(num_images: int, place: str, facts: WorkerFacts) -> None:
    if facts.images is None:
        raise ImageMismatch(
            f"{place}: expected no images, as {facts.model} takes token ids only, got {num_images}",
            param="images",
        )
    if num_images > facts.images.max_images:
        raise ImageMismatch(
            f"{place}: expected at most {facts.images.max_images} images in a prompt "
            f"(--limit-mm-per-prompt), got {num_images}",
            param="images",
        )


def _refuse_truncation(body: GenerateBody) -> None:
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


def _short(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=16).digest()


def _decode_base64(text: str, place: str) -> bytes:
    if re.match(r"\w+://", text):
        raise InvalidImage(
            f"{place}: expected an image in base64, got a URL; the server fetches none: send the "
            "file's bytes",
            param="images",
        )
    header = _DATA_URL.match(text)
    try:
        return binascii.a2b_base64(text[header.end() :] if header else text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidImage(
            f"{place}: expected an image in base64, got {_shown(text)} ({error})", param="images"
        ) from None


def check_file(data: bytes, place: str, max_pixels: int) -> None:
    """Refuses what Pillow cannot open, and what would take too much memory to decode."""
    try:
        with PIL.Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            # A PNG's checksums: a file that was cut off is found without decoding it.
            image.verify()
    except Exception as error:
        # Pillow raises whatever its readers stumble over; this one has nothing to say.
        is_unknown = isinstance(error, PIL.UnidentifiedImageError)
        reason = "" if is_unknown else f": {type(error).__name__}: {error}"
        raise InvalidImage(
            f"{place}: expected an image file ({', '.join(FORMATS)}), got {len(data)} bytes that "
            f"are none{reason}"[:500],
            param="images",
        ) from None
    if not 0 < width * height <= max_pixels:
        raise InvalidImage(
            f"{place}: expected an image of 1 to {max_pixels} pixels (max_image_pixels), got "
            f"{width} x {height} = {width * height}; scale it down",
            param="images",
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidImage(
            f"{place}: expected an image whose longer side is at most {MAX_ASPECT_RATIO} times the "
            f"shorter, got {width} x {height}",
            param="images",
        )


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}…"
