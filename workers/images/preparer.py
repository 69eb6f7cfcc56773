"""Prompts with images on their way to the engine: decoded and processed in threads.

So text prompts do not wait for them. What is placed where is `workers/images/placeholders.py`'s.
Everything of torch is imported inside functions, as in `workers/engine/vllm.py`.
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

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A prompt that the engine takes as it is."""

    # vLLM's MultiModalInput.
    engine_input: Any
    # With all placeholders expanded; int32, little-endian.
    token_ids: bytes
    # Images that were processed, and how long a thread was at it.
    num_images: int
    elapsed_s: float
    num_bytes: int


class ImagePreparer:
    """Makes engine inputs of prompts with images, in threads of its own."""

    def __init__(self, model_config: Any, tokenizer: Any, *, num_threads: int, max_bytes: int):
        """
        Args:
            model_config: vLLM's.
            max_bytes: tensors of prompts under way, above which no further prompt is begun.
        """
        import torch

        # There are as many threads as there shall be.
        torch.set_num_threads(1)
        self._max_model_len = model_config.max_model_len
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_room = asyncio.Condition()
        self._turn = asyncio.Semaphore(num_threads)
        # A tokenizer is not safe to share between threads: each has a processor of its own.
        self._free: queue.SimpleQueue[PlacingProcessor] = queue.SimpleQueue()
        self.facts: ImageFacts | None = None
        for _ in range(num_threads):
            processor = PlacingProcessor(model_config, tokenizer)
            # Also where the facts are known: the first image loads what it needs.
            self.facts = processor.learn()
            self._free.put(processor)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="images")

    @asynccontextmanager
    async def prepared(self, job: Job) -> AsyncIterator[Prepared]:
        """`job` as vLLM takes it; its tensors count as held until the context ends.

        Raises:
            InvalidImage: an image cannot be decoded, or the model's processor refuses it.
            ImageMismatch: images and placeholders do not fit together.
            PromptTooLong: there is no room left once the placeholders are expanded.
        """
        async with self._turn:
            async with self._has_room:
                await self._has_room.wait_for(lambda: self._num_bytes < self._max_bytes)
            loop = asyncio.get_running_loop()
            prompt = await loop.run_in_executor(self._threads, self._prepare, job)
            self._num_bytes += prompt.num_bytes
        try:
            yield prompt
        finally:
            self._num_bytes -= prompt.num_bytes
            async with self._has_room:
                self._has_room.notify_all()

    def _prepare(self, job: Job) -> Prepared:
        begin = time.monotonic()
        images = [_decode(image.data, number) for number, image in enumerate(job.images)]
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
        token_ids = engine_input["prompt_token_ids"]
        self._check_length(len(token_ids))
        if job.cache_salt:
            engine_input["cache_salt"] = job.cache_salt
        return Prepared(
            engine_input,
            np.array(token_ids, dtype=np.int32).tobytes(),
            num_images=len(images),
            elapsed_s=time.monotonic() - begin,
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
        """Begins no further prompt."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _decode(data: bytes, number: int) -> PIL.Image.Image:
    """As transformers reads an image: turned as its EXIF says, first frame, in RGB."""
    from transformers.image_utils import load_image

    try:
        image: PIL.Image.Image = load_image(open_image(data))
    except Exception as error:
        # Pillow raises whatever its readers stumble over.
        raise InvalidImage(
            f"image {number}: expected a whole image file, got one that cannot be decoded: "
            f"{type(error).__name__}: {error}"[:500],
            param="images",
        ) from error
    return image


def _num_bytes(engine_input: Any) -> int:
    """Of all tensors of all images."""
    items = [item for items in engine_input["mm_kwargs"].values() for item in items]
    return sum(_nested_bytes(field.data) for item in items for field in item.values())


def _nested_bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_nested_bytes, value))
    return int(getattr(value, "nbytes", 0))
