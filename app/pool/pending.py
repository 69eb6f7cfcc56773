"""One HTTP request's jobs, and the single end that they come to.

Made by a handler, which waits; completed or failed by the link.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gevent.event import Event

from titopool.errors import TitopoolError
from titopool.wire.messages import Chunk, Completed, Job, WorkerFacts


class Request:
    """Jobs in the order of the request, and their results in the same order."""

    def __init__(
        self,
        jobs: list[Job],
        places: Sequence[str] = (),
        *,
        facts: WorkerFacts | None = None,
    ):
        """Jobs and what they were made of.

        Args:
            places: of the jobs' prompts in the client's body; none: `prompts[0]`, …
            facts: of the model that the jobs were checked for; None: any will do.
        """
        self.jobs = jobs
        self.facts = facts
        self._places = places or [f"prompts[{index}]" for index in range(len(jobs))]
        self.results: list[Completed | None] = [None] * len(jobs)
        self.error: TitopoolError | None = None
        self.num_open = len(jobs)
        self._done = Event()

    @property
    def is_done(self) -> bool:
        """Whether the end has come: all jobs are complete, or one has failed."""
        return bool(self._done.is_set())

    def place_of(self, index: int) -> str:
        """Where the prompt of job `index` stood in the client's body."""
        return self._places[index]

    def add_chunk(self, index: int, chunk: Chunk) -> None:
        """Records what job `index` made meanwhile; only a streamed one makes chunks."""

    def has_chunks(self, index: int) -> bool:
        """Whether the client may have seen something of job `index`: it cannot begin anew."""
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
        """Ends the request with `error`; returns whether it had not ended before."""
        if self._done.is_set():
            return False
        self.error = error
        self._done.set()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the end, at most `timeout_s`; returns whether it has come."""
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
    """One whose chunks are read as they come."""

    def __init__(
        self,
        jobs: list[Job],
        places: Sequence[str] = (),
        *,
        facts: WorkerFacts | None = None,
    ):
        super().__init__(jobs, places, facts=facts)
        self._chunks: deque[ChunkOfJob] = deque()
        self._begun: set[int] = set()
        # Set when there is something to read, or the end has come.
        self._news = Event()

    def add_chunk(self, index: int, chunk: Chunk) -> None:
        if not self.is_done:
            self._begun.add(index)
            self._chunks.append(ChunkOfJob(index, chunk))
            self._news.set()

    def has_chunks(self, index: int) -> bool:
        return index in self._begun

    def complete(self, index: int, result: Completed) -> None:
        super().complete(index, result)
        if self.is_done:
            self._news.set()

    def fail(self, error: TitopoolError) -> bool:
        has_failed = super().fail(error)
        self._news.set()
        return has_failed

    def wait_for_news(self, timeout_s: float) -> bool:
        """Blocks until there are chunks or the end has come; returns whether so."""
        return bool(self._news.wait(timeout_s))

    def take_chunks(self) -> list[ChunkOfJob]:
        """All chunks that have come since the last call, in order."""
        taken = list(self._chunks)
        self._chunks.clear()
        if not self.is_done:
            self._news.clear()
        return taken
