"""Decodes and processes the images of one prompt.

Runs in: the processes of `workers/images/processes.py`.
"""

import time
from typing import Any

import msgspec
import numpy as np
import PIL.Image

from titopool.errors import InvalidImage, PromptTooLong
from titopool.wire.image_files import open_image
from titopool.wire.messages import Image, Job
from workers.images.exchange import prepared_type
from workers.images.placeholders import PlacingProcessor
from workers.images.ranges import check_ranges


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What a job's preparation depends on; the fields are the job's."""

    prompt_token_ids: bytes
    images: list[Image]
    mm_processor_kwargs: dict[str, Any]
    image_ranges: list[tuple[int, int]]


def request_of(job: Job) -> Request:
    return Request(job.prompt_token_ids, job.images, job.mm_processor_kwargs, job.image_ranges)


def prepare(request: Request, processor: PlacingProcessor, max_model_len: int) -> Any:
    """The prompt as vLLM takes it: a `prepared_type()`.

    Raises:
        InvalidImage: an image cannot be decoded, or the model's processor refuses it.
        ImageMismatch: the images do not fit the placeholders, or the request's ranges.
        PromptTooLong: the prompt is too long once the placeholders are expanded.
    """
    begin = time.monotonic()
    images = [_decode(image.data, number) for number, image in enumerate(request.images)]
    decode_s = time.monotonic() - begin
    fields = dict(
        processor.apply(
            np.frombuffer(request.prompt_token_ids, dtype=np.int32).tolist(),
            images,
            [image.digest.hex() for image in request.images],
            request.mm_processor_kwargs,
        )
    )
    token_ids = np.array(fields.pop("prompt_token_ids"), dtype=np.int32)
    placeholders = {kind: list(found) for kind, found in fields.pop("mm_placeholders").items()}
    if request.image_ranges:
        check_ranges(
            request.prompt_token_ids,
            request.image_ranges,
            token_ids.tobytes(),
            placeholders.get("image", ()),
        )
    _check_length(len(token_ids), max_model_len)
    return prepared_type()(
        token_ids=token_ids.tobytes(),
        mm_kwargs=fields.pop("mm_kwargs"),
        mm_hashes=fields.pop("mm_hashes"),
        mm_placeholders=placeholders,
        fields=fields,
        decode_s=decode_s,
        elapsed_s=time.monotonic() - begin,
    )


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens >= max_model_len:
        raise PromptTooLong(
            f"expected at most {max_model_len - 1} tokens with its images expanded, one less than "
            f"the model's {max_model_len} (max_model_len), got {num_tokens}; send fewer or smaller "
            "images (mm_processor_kwargs.max_pixels), or less text"
        )


def _decode(data: bytes, number: int) -> PIL.Image.Image:
    """Decodes as transformers does: rotated by its EXIF entry, first frame, in RGB."""
    from transformers.image_utils import load_image

    try:
        image: PIL.Image.Image = load_image(open_image(data))
    except Exception as error:
        # Pillow's readers may raise anything.
        raise InvalidImage(
            f"image {number}: expected a complete image file, got one that cannot be decoded: "
            f"{type(error).__name__}: {error}"[:500],
            param="images",
        ) from error
    # transformers' conversion leaves a palette's transparent colour here, and vLLM 0.33 would then put the
    # image on white.
    image.info.pop("transparency", None)
    return image
