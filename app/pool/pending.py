"""One HTTP request's jobs, their results, and the single end of the request.

A handler creates the request and waits; the link completes or fails it.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gevent.event import Event

from titopool.errors import TitopoolError
from titopool.wire.messages import Chunk, Completed, Job, WorkerFacts


class Request:
    """Jobs in the order of the HTTP request, and their results in the same order."""

    def __init__(
        self,
        jobs: list[Job],
        locations: Sequence[str] = (),
        *,
        facts: WorkerFacts | None = None,
    ):
        """A request without results.

        Args:
            locations: where each prompt stood in the client's body; default `prompts[0]`, ….
            facts: the model that the jobs were checked for; None: any model may run them.
        """
        self.jobs = jobs
        self.facts = facts
        self._locations = locations or [f"prompts[{index}]" for index in range(len(jobs))]
        self.results: list[Completed | None] = [None] * len(jobs)
        self.error: TitopoolError | None = None
        self.num_open = len(jobs)
        self._done = Event()

    @property
    def is_done(self) -> bool:
        """Whether the request has ended: all jobs are complete, or one has failed."""
        return bool(self._done.is_set())

    def location_of(self, index: int) -> str:
        """Where the prompt of job `index` stood in the client's body."""
        return self._locations[index]

    def add_chunk(self, index: int, chunk: Chunk) -> None:
        """Records a chunk of job `index`; only streamed jobs have chunks."""

    def has_chunks(self, index: int) -> bool:
        """Whether the client may have received a chunk of job `index`, so that no retry is allowed."""
        return False

    def complete(self, index: int, result: Completed) -> None:
        """Records the result of job `index`; does nothing after the end."""
        if self._done.is_set() or self.results[index] is not None:
            return
        self.results[index] = result
        self.num_open -= 1
        if self.num_open == 0:
            self._done.set()

    def fail(self, error: TitopoolError) -> bool:
        """Ends the request with `error`; returns False if the request had already ended."""
        if self._done.is_set():
            return False
        self.error = error
        self._done.set()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the end, at most `timeout_s`; returns False on timeout."""
        return bool(self._done.wait(timeout_s))

    def completed(self) -> list[Completed]:
        """The results of all jobs.

        Raises:
            TitopoolError: why the request failed.
        """
        if self.error is not None:
            raise self.error
        return [result for result in self.results if result is not None]


class ChunkOfJob(NamedTuple):
    """A chunk and the index of its job in the request."""

    job_index: int
    chunk: Chunk


class StreamedRequest(Request):
    """A request whose chunks are read as they arrive."""

    def __init__(
        self,
        jobs: list[Job],
        locations: Sequence[str] = (),
        *,
        facts: WorkerFacts | None = None,
    ):
        super().__init__(jobs, locations, facts=facts)
        self._chunks: deque[ChunkOfJob] = deque()
        self._begun: set[int] = set()
        # Set while there are unread chunks, and from the end on.
        self._progress = Event()

    def add_chunk(self, index: int, chunk: Chunk) -> None:
        if not self.is_done:
            self._begun.add(index)
            self._chunks.append(ChunkOfJob(index, chunk))
            self._progress.set()

    def has_chunks(self, index: int) -> bool:
        return index in self._begun

    def complete(self, index: int, result: Completed) -> None:
        super().complete(index, result)
        if self.is_done:
            self._progress.set()

    def fail(self, error: TitopoolError) -> bool:
        has_failed = super().fail(error)
        self._progress.set()
        return has_failed

    def wait_for_progress(self, timeout_s: float) -> bool:
        """Blocks until there are unread chunks or the end has come; returns False on timeout."""
        return bool(self._progress.wait(timeout_s))

    def take_chunks(self) -> list[ChunkOfJob]:
        """All chunks since the last call, in order."""
        taken = list(self._chunks)
        self._chunks.clear()
        if not self.is_done:
            self._progress.clear()
        return taken
