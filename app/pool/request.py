"""One HTTP request's jobs, their results, and the single end of the request.

A handler creates the request and waits; the link completes or fails it.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gevent.event import Event

from titopool.errors import TitopoolError
from titopool.wire.messages import (
    COMPLETION_BYTES,
    ID_BYTES,
    Chunk,
    Completed,
    Completion,
    Job,
    WorkerFacts,
    decode_chunk,
    encode,
)

# Of an encoded chunk, beside its bytes.
FRAME_BYTES = 200
# Of chunks, what is taken at once, or one chunk: their text takes some times as much.
TAKEN_BYTES = 16 * 1024


class CountBytes(Protocol):
    """Counts the memory of results."""

    def __call__(self, num_bytes: int, bound: int = 0) -> TitopoolError | None:
        """As `app.http.budget.Reservation.receive`."""


def count_nothing(num_bytes: int, bound: int = 0) -> TitopoolError | None:
    """A `CountBytes` without a bound."""
    return None


class ChunkOfJob(NamedTuple):
    """A chunk and the index of its job in the request."""

    job_index: int
    chunk: Chunk


class Request:
    """Jobs in the order of the HTTP request, and their results in the same order.

    The chunks of streamed jobs are read as they arrive.
    """

    def __init__(
        self,
        jobs: list[Job],
        locations: Sequence[str] = (),
        *,
        facts: WorkerFacts | None = None,
        session: str = "",
        weight: int = 1,
        count_bytes: CountBytes = count_nothing,
        bounds: Sequence[int] = (),
    ):
        """A request without results.

        Args:
            locations: where each prompt stood in the client's body; default `prompts[0]`, ….
            facts: the model that the jobs were checked for; None: any model may run them.
            session: jobs of one session prefer the same worker; "": no session.
            weight: of the client's key, whose name the jobs have.
            count_bytes: gets the memory that a result takes as it arrives, below 0 what read chunks
                took, and the result's bound; returns why there is no room for it.
            bounds: the memory that is expected of each job's result; empty: it is not known.
        """
        self.jobs = jobs
        self.facts = facts
        self.session = session
        self.weight = weight
        self.locations = locations or [f"prompts[{index}]" for index in range(len(jobs))]
        self.results: list[Completed | None] = [None] * len(jobs)
        self.error: TitopoolError | None = None
        self._num_open = len(jobs)
        # Monotonic times of the arrival in the queue and of the first token; 0: not yet.
        self.submitted_at = self.first_token_at = 0.0
        # Of completed jobs.
        self.num_prompt_tokens = self.num_completion_tokens = 0
        # Monotonic: when the first job was sent to a worker, and when the request ended.
        self.placed_s: float | None = None
        self.done_s: float | None = None
        # Names of the workers that got jobs.
        self.workers: set[str] = set()
        # Of chunks, and of the results of jobs that are not streamed.
        self.num_streamed_tokens = self._num_whole_tokens = 0
        # Of completions.
        self.finish_reasons: set[str] = set()
        self.weight_versions: set[int] = set()
        # Memory that results take.
        self.num_result_bytes = 0
        self.count_bytes, self.bounds = count_bytes, bounds
        self._done = Event()
        # Those that are not taken: the index of the job, the chunk, of all but the first encoded, and its
        # memory. And the memory of those that were taken last.
        self._chunks: deque[tuple[int, Chunk | bytes, int]] = deque()
        self._taken_bytes = 0
        self._has_chunks: set[int] = set()
        # Set while there are unread chunks, and from the end on.
        self._progress = Event()

    @property
    def is_done(self) -> bool:
        """Whether the request has ended: all jobs are complete, or one has failed."""
        return bool(self._done.is_set())

    def add_chunk(self, index: int, chunk: Chunk) -> TitopoolError | None:
        """Records a chunk of job `index`; does nothing after the end. Returns why it has no room."""
        if not self.is_done:
            kept, num_bytes = self._kept(chunk)
            if error := self.count_bytes(num_bytes):
                return error
            num_tokens = _num_tokens([piece for _, piece in chunk.pieces])
            if num_tokens:
                self.note_first_token()
            self._has_chunks.add(index)
            self._chunks.append((index, kept, num_bytes))
            self.num_streamed_tokens += num_tokens
            self._progress.set()
        return None

    def _kept(self, chunk: Chunk) -> tuple[Chunk | bytes, int]:
        """A chunk as it waits to be taken, and its memory.

        Behind another one, which its client has not read, it is encoded: that takes two fifths of the
        memory, and the garbage collector need not visit the chunks of slow clients.
        """
        if not self._chunks:
            return chunk, chunk.num_bytes
        kept = encode(chunk)
        return kept, len(kept) + FRAME_BYTES

    def note_first_token(self) -> None:
        """Records that a job has a token, if it is the request's first."""
        if not self.first_token_at:
            self.first_token_at = time.monotonic()

    @property
    def num_tokens(self) -> int:
        """Sampled tokens that have come; those of a job that is not streamed come at its end."""
        return self.num_streamed_tokens + self._num_whole_tokens

    @property
    def num_input_tokens(self) -> int:
        """Of all prompts, with image placeholders as the client sent them."""
        return sum(len(job.prompt_token_ids) for job in self.jobs) // ID_BYTES

    @property
    def model(self) -> str:
        """The name of the LoRA adapter of its first job, else of the model; "" if it is unknown."""
        adapter = self.jobs[0].adapter if self.jobs else ""
        return adapter or (self.facts.model if self.facts else "")

    def has_chunks(self, index: int) -> bool:
        """Whether the client may have received a chunk of job `index`, so that no retry is allowed."""
        return index in self._has_chunks

    def complete(self, index: int, result: Completed) -> TitopoolError | None:
        """Records the result of job `index`; does nothing after the end. Returns why it has no room."""
        if self.is_done or self.results[index] is not None:
            return None
        # Without a token, as after an abort, it is never refused.
        num_bytes = (
            result.num_bytes and COMPLETION_BYTES * len(result.completions) + result.num_bytes
        )
        if error := self.count_bytes(num_bytes, self.bounds[index] if self.bounds else 0):
            return error
        self.results[index] = result
        if result.completions:
            prompt = result.prompt_token_ids or self.jobs[index].prompt_token_ids
            self.num_prompt_tokens += len(prompt) // ID_BYTES
            num_tokens = _num_tokens(result.completions)
            if num_tokens:
                # One that was aborted before has none.
                self.note_first_token()
            self.num_completion_tokens += num_tokens
            # The results of streamed jobs repeat their tokens.
            self._num_whole_tokens += 0 if self.jobs[index].is_streamed else num_tokens
            for one in result.completions:
                self.finish_reasons.add(one.finish_reason)
                self.weight_versions.update(version for version, _ in one.weight_versions)
        self.num_result_bytes += num_bytes
        self._num_open -= 1
        if self._num_open == 0:
            self._end()
        return None

    def fail(self, error: TitopoolError) -> bool:
        """Ends the request with `error`; returns False if the request had already ended."""
        if self.is_done:
            return False
        self.error = error
        # Another request may need their memory before a handler runs.
        self.results = []
        self._end()
        return True

    def note_placed(self, worker: str) -> None:
        """A job is sent to `worker`."""
        if self.placed_s is None:
            self.placed_s = time.monotonic()
        self.workers.add(worker)

    def _end(self) -> None:
        self.done_s = time.monotonic()
        self._done.set()
        self._progress.set()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the end, at most `timeout_s`; returns False on timeout."""
        return bool(self._done.wait(timeout_s))

    def wait_for_progress(self, timeout_s: float) -> bool:
        """Blocks until there are unread chunks or the end has come; returns False on timeout."""
        return bool(self._progress.wait(timeout_s))

    @property
    def is_behind(self) -> bool:
        """Whether there are chunks that were not taken."""
        return bool(self._chunks)

    def take_chunks(self) -> list[ChunkOfJob]:
        """The next chunks, in order; none: there are none yet, or no more.

        They count until the next call, as who takes them writes them before.
        """
        self.count_bytes(-self._taken_bytes)
        taken, self._taken_bytes = [], 0
        while self._chunks and self._taken_bytes < TAKEN_BYTES:
            index, kept, num_bytes = self._chunks.popleft()
            chunk = decode_chunk(kept) if isinstance(kept, bytes) else kept
            taken.append(ChunkOfJob(index, chunk))
            self._taken_bytes += num_bytes
        if not (self._chunks or self.is_done):
            self._progress.clear()
        return taken

    def raise_if_failed(self) -> None:
        """Raises the error of a failed request."""
        if self.error is not None:
            # One error may end many requests: drop the frames of those that raised it before.
            raise self.error.with_traceback(None)

    def take_results(self) -> list[Completed]:
        """The results of all jobs, which it has no longer.

        Raises:
            TitopoolError: why the request failed.
        """
        self.raise_if_failed()
        taken, self.results = self.results, []
        return [result for result in taken if result is not None]


def _num_tokens(completions: Sequence[Completion]) -> int:
    return sum(len(one.token_ids) for one in completions) // ID_BYTES
