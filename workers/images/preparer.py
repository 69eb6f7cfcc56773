"""Decodes and processes the images of prompts in threads, so that text prompts do not wait.

`workers/images/placeholders.py` places the images. torch and transformers are imported inside functions,
as in `workers/engine/vllm.py`.
"""

import asyncio
import logging
import queue
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from titopool.errors import InvalidImage, PromptTooLong
from titopool.wire.image_files import open_image
from titopool.wire.messages import ImageFacts, Job
from workers.images.placeholders import PlacingProcessor
from workers.images.ranges import check_ranges

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A prompt with processed images, as the engine takes it."""

    # vLLM's MultiModalInput.
    engine_input: Any
    # With all placeholders expanded; int32, little-endian.
    token_ids: bytes
    # Offset and length of each image in the ids.
    image_ranges: list[tuple[int, int]]
    # The number of images, and the seconds that a thread took for them.
    num_images: int
    elapsed_s: float
    # Of these, for decoding the files.
    decode_s: float
    # Of all tensors.
    num_bytes: int


class ImagePreparer:
    """Makes engine inputs from prompts with images, in its threads."""

    def __init__(self, model_config: Any, tokenizer: Any, *, num_threads: int, max_bytes: int):
        """
        Args:
            model_config: vLLM's.
            max_bytes: of tensors in flight; at this limit, further prompts wait, but no renders.
        """
        import torch

        # Prompts are processed in parallel, so each operation of torch uses one thread.
        torch.set_num_threads(1)
        self._max_model_len = model_config.max_model_len
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_room = asyncio.Condition()
        # As many prompts may pass the limit at once; those that wait for room hold no thread.
        self._turns = asyncio.Semaphore(num_threads)
        # A tokenizer is not thread-safe: each thread has a processor with a copy.
        self._free: queue.SimpleQueue[PlacingProcessor] = queue.SimpleQueue()
        self.facts: ImageFacts | None = None
        for _ in range(num_threads):
            processor = PlacingProcessor(model_config, tokenizer)
            # Each processor tries an image, because the first one loads code.
            self.facts = processor.learn()
            self._free.put(processor)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="images")

    @asynccontextmanager
    async def prepared(self, job: Job) -> AsyncIterator[Prepared]:
        """`job` as vLLM takes it; its tensors count as in flight until the context ends.

        A job without completions drops its tensors at once: it waits for a thread only.

        Raises:
            InvalidImage: an image cannot be decoded, or the model's processor refuses it.
            ImageMismatch: the images do not fit the placeholders, or the ranges in the job.
            PromptTooLong: the prompt is too long once the placeholders are expanded.
        """
        if not job.num_sequences:
            yield await self._in_thread(job)
            return
        async with self._turns:
            async with self._has_room:
                await self._has_room.wait_for(lambda: self._num_bytes < self._max_bytes)
            prompt = await self._in_thread(job)
            self._num_bytes += prompt.num_bytes
        try:
            yield prompt
        finally:
            self._num_bytes -= prompt.num_bytes
            async with self._has_room:
                self._has_room.notify_all()

    async def _in_thread(self, job: Job) -> Prepared:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._prepare, job)

    def _prepare(self, job: Job) -> Prepared:
        begin = time.monotonic()
        images = [_decode(image.data, number) for number, image in enumerate(job.images)]
        decode_s = time.monotonic() - begin
        processor = self._free.get()
        try:
            engine_input = processor.apply(
                np.frombuffer(job.prompt_token_ids, dtype=np.int32).tolist(),
                images,
                [image.digest.hex() for image in job.images],
                job.mm_processor_kwargs,
            )
        finally:
            self._free.put(processor)
        token_ids = np.array(engine_input["prompt_token_ids"], dtype=np.int32).tobytes()
        places = engine_input["mm_placeholders"].get("image", ())
        if job.image_ranges:
            check_ranges(job, token_ids, places)
        self._check_length(len(engine_input["prompt_token_ids"]))
        if job.cache_salt:
            engine_input["cache_salt"] = job.cache_salt
        return Prepared(
            engine_input,
            token_ids,
            [(one.offset, one.length) for one in places],
            num_images=len(images),
            elapsed_s=time.monotonic() - begin,
            decode_s=decode_s,
            num_bytes=_num_bytes(engine_input),
        )

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise PromptTooLong(
                f"expected at most {self._max_model_len - 1} tokens with its images expanded, one "
                f"less than the model's {self._max_model_len} (max_model_len), got {num_tokens}; "
                "send fewer or smaller images (mm_processor_kwargs.max_pixels), or less text"
            )

    def close(self) -> None:
        """Cancels prompts that wait for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


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
    return image


def _num_bytes(engine_input: Any) -> int:
    """Bytes of all tensors of all images."""
    items = [item for items in engine_input["mm_kwargs"].values() for item in items]
    return sum(_nested_bytes(field.data) for item in items for field in item.values())


def _nested_bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_nested_bytes, value))
    return int(getattr(value, "nbytes", 0))
