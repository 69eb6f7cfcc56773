"""What a worker needs of an engine; `workers/engine/vllm.py` is the only implementation shipped.

Runs in: each worker process, on its event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from titopool.wire.messages import (
    Chunk,
    Completion,
    Job,
    JobProgress,
    Logprobs,
    MetricFamily,
    WorkerCounters,
    WorkerFacts,
)
from workers.engine.lora import Adapters
from workers.engine.versions import Versions
from workers.engine.weights import WeightEngine

ReportPhase = Callable[[str], None]
Ended = TypeVar("Ended")
OnChunk = Callable[[Chunk | JobProgress], None]


class Timings(NamedTuple):
    """When the engine's scheduler got a request, ran it first, and made tokens; monotonic times."""

    queued_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float


class Generated(NamedTuple):
    """The result of a job."""

    completions: list[Completion]
    # Prompt tokens found in the prefix cache.
    num_cached_tokens: int = 0
    # With images: the prompt with all placeholders expanded, offset and length of each image in it,
    # the number of processed images, and the seconds of processing, and of these for decoding.
    prompt_token_ids: bytes = b""
    image_ranges: Sequence[tuple[int, int]] = ()
    num_images: int = 0
    image_s: float = 0.0
    image_decode_s: float = 0.0
    prompt_logprobs: Logprobs | None = None
    adapter_version: int | None = None
    # None: the engine does not measure them.
    timings: Timings | None = None


class Slots(Protocol):
    """The engine's slots for one job. The job has the one of its first completion when it begins."""

    is_stopped: bool

    async def take(self) -> bool:
        """Returns once the next completion may start; False if none may, because of `stop`."""

    def give_back(self, num_steps: int, took_s: float) -> None:
        """The engine has ended a completion after `num_steps`, which took so long."""

    def stop(self) -> None:
        """No further completion starts."""


class FreeSlots:
    """`Slots` of an engine that has nothing else to do."""

    is_stopped = False

    async def take(self) -> bool:
        return True

    def give_back(self, num_steps: int, took_s: float) -> None:
        pass

    def stop(self) -> None:
        pass


async def in_slots(
    num: int,
    complete: Callable[[int], Coroutine[Any, Any, Ended]],
    slots: Slots,
    *,
    after: asyncio.Event | None = None,
) -> list[Ended]:
    """Runs `complete(index)` for `num` completions of a job, each as soon as it has a slot.

    Args:
        after: what the others wait for, besides their slots.

    Returns:
        The results in order; fewer if no further completion may start.
    """
    if num == 1:
        return [await complete(0)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(complete(0))]
            if after is not None:
                await after.wait()
            while len(tasks) < num and await slots.take():
                tasks.append(group.create_task(complete(len(tasks))))
    except BaseExceptionGroup as errors:
        # The others were cancelled, as the job fails with the first.
        error = errors.exceptions[0]
        raise error from error.__cause__
    return [task.result() for task in tasks]


class EngineDead(Exception):
    """The engine can never answer again; the worker process must end."""


class Engine(Protocol):
    """What a worker process asks of its engine."""

    versions: Versions
    # LoRA adapters; set once the model is loaded.
    adapters: Adapters
    # Whether steps that only decode run as CUDA graphs of their own; set once the model is loaded.
    has_decode_graphs: bool
    # The worker's, which an engine that parses adds to; set before `load`.
    counters: WorkerCounters

    @property
    def weights(self) -> WeightEngine:
        """The engine's side of weight updates; usable once the model is loaded."""

    @property
    def has_died(self) -> bool:
        """Whether the engine's processes are known to have ended; returns at once."""

    def load(self, report: ReportPhase) -> WorkerFacts:
        """Loads the model and blocks until then; called in a thread. Calls `report` with each phase."""

    async def warm_up(self) -> None:
        """Generates once, so that no request waits for code that is compiled on first use."""

    async def run(self, job: Job, on_chunk: OnChunk, slots: Slots) -> Generated:
        """Generates all completions of `job`, each in a slot.

        `on_chunk` gets the chunks of a streamed job, and of another one that it has its first token.

        Cancelling the call stops the generation.

        Raises:
            InvalidRequest: the engine refuses the job.
            GenerationFailed: the engine failed on this job only.
            EngineDead: the engine's processes have ended.
        """

    async def probe(self) -> None:
        """Returns once the engine's loop has turned; hangs if the loop hangs."""

    def metrics(self, worker_id: str) -> Iterable[MetricFamily | None]:
        """The engine's own metrics with the label `worker`; None for one that is too large.

        Each step of the iteration takes less than a millisecond.
        """

    def close(self) -> None:
        """Stops the engine's processes; blocks for seconds."""
