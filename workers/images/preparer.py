"""Prepares prompts with images in processes of its own, so that text prompts do not wait.

`workers/images/placeholders.py` places the images. torch is imported inside functions, as in
`workers/engine/vllm.py`.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from titopool.wire.messages import ImageFacts, Job
from workers.images.placeholders import PlacingProcessor
from workers.images.preparation import Request, request_of
from workers.images.processes import ImageProcesses
from workers.shared_calls import SharedCalls

# Of one prompt's preparation, which `max_image_pixels` bounds.
TIMEOUT_S = 120.0
# Of prepared prompts that are kept for equal ones.
MAX_RECENT_BYTES = 256 * 2**20


class Prepared(NamedTuple):
    """A prompt with processed images, as the engine takes it."""

    # vLLM's MultiModalInput.
    engine_input: Any
    # With all placeholders expanded; int32, little-endian.
    token_ids: bytes
    # Offset and length of each image in the ids.
    image_ranges: list[tuple[int, int]]
    # The number of images, and the seconds that a process took for them; 0 for an equal prompt.
    num_images: int
    elapsed_s: float
    # Of these, for decoding the files.
    decode_s: float
    # Of all tensors.
    num_bytes: int


class ImagePreparer:
    """Makes engine inputs from prompts with images, in its processes.

    `facts`: of the model's images; None: it takes none.
    """

    def __init__(
        self,
        model_config: Any,
        tokenizer: Any,
        *,
        num_processes: int,
        max_bytes: int,
        timeout_s: float = TIMEOUT_S,
    ):
        """
        Args:
            model_config: vLLM's.
            max_bytes: of tensors in flight; at this limit, further prompts wait, but no renders.
            timeout_s: of the preparation of one prompt; its process is killed then.
        """
        import torch

        # Prompts are processed in parallel, so each operation of torch uses one thread. A fork
        # has no others.
        torch.set_num_threads(1)
        self._max_bytes = max_bytes
        # Generations of each prompt, and the bytes of its tensors; equal prompts share them.
        self._num_users: Counter[bytes] = Counter()
        self._held: dict[bytes, int] = {}
        self._has_room = asyncio.Condition()
        # As many prompts may pass the limit at once; those that wait for room hold no process.
        self._turns = asyncio.Semaphore(num_processes)
        processor = PlacingProcessor(model_config, tokenizer)
        # The first image loads code, which the forks then have.
        self.facts: ImageFacts | None = processor.learn()
        if self.facts is None:
            return
        self._processes = ImageProcesses(
            processor,
            max_model_len=model_config.max_model_len,
            number=num_processes,
            timeout_s=timeout_s,
        )
        # Prompts by all that they are made from: a group of GRPO may come as equal prompts.
        self._recent: SharedCalls[Prepared] = SharedCalls(
            min(max_bytes, MAX_RECENT_BYTES), lambda prompt: prompt.num_bytes
        )
        # Each waits for a process's answer.
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="images")

    @asynccontextmanager
    async def prepared(self, job: Job) -> AsyncIterator[Prepared]:
        """`job` as vLLM takes it; its tensors count as in flight until the context ends.

        A job without completions waits for a process only.

        Raises:
            InvalidImage: an image cannot be decoded, or the model's processor refuses it.
            ImageMismatch: the images do not fit the placeholders, or the ranges in the job.
            PromptTooLong: the prompt is too long once the placeholders are expanded.
            GenerationFailed: the process ended twice with this prompt, or took too long for it.
        """
        key = _digest(job)
        if not job.num_sequences:
            yield _own(job, *await self._recent.outcome(key, lambda: self._in_process(job)))
            return
        self._num_users[key] += 1
        try:
            prompt, is_new = await self._recent.outcome(key, lambda: self._in_room(key, job))
            # Also of a prompt that was kept.
            self._held[key] = prompt.num_bytes
            yield _own(job, prompt, is_new)
        finally:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key]
                self._held.pop(key, None)
                async with self._has_room:
                    self._has_room.notify_all()

    @property
    def _num_bytes(self) -> int:
        return sum(self._held.values())

    async def _in_room(self, key: bytes, job: Job) -> Prepared:
        async with self._turns:
            async with self._has_room:
                await self._has_room.wait_for(lambda: self._num_bytes < self._max_bytes)
            prompt = await self._in_process(job)
            # Before the next prompt's turn.
            self._held[key] = prompt.num_bytes
            return prompt

    async def _in_process(self, job: Job) -> Prepared:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._prepare, request_of(job))

    def _prepare(self, request: Request) -> Prepared:
        made, num_bytes = self._processes.prepare(request)
        engine_input = {
            **made.fields,
            "mm_kwargs": made.mm_kwargs,
            "mm_hashes": made.mm_hashes,
            "mm_placeholders": made.mm_placeholders,
        }
        return Prepared(
            engine_input,
            made.token_ids,
            [(one.offset, one.length) for one in made.mm_placeholders.get("image", ())],
            num_images=len(request.images),
            elapsed_s=made.elapsed_s,
            decode_s=made.decode_s,
            num_bytes=num_bytes,
        )

    def close(self) -> None:
        """Kills the processes and cancels prompts that wait for one."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()


def _digest(job: Job) -> bytes:
    """Of what the preparation depends on; an image's digest stands for its file."""
    images = [image.digest for image in job.images]
    # A render does not wait for room, so it cannot share the call of a generation that does.
    is_render = not job.num_sequences
    parts = (job.prompt_token_ids, images, job.mm_processor_kwargs, job.image_ranges, is_render)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _own(job: Job, prompt: Prepared, is_new: bool) -> Prepared:
    """The job's own input of a prompt that equal jobs share."""
    if not is_new:
        prompt = prompt._replace(elapsed_s=0.0, decode_s=0.0)
    # Ids as a list take ten times their bytes, so it is not kept.
    own = {"prompt_token_ids": np.frombuffer(prompt.token_ids, dtype=np.int32).tolist()}
    return prompt._replace(engine_input={**prompt.engine_input, **own})
