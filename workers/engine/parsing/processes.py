"""Sends what completions gain to the helpers that parse, and gives back what the parsers make of it.

Runs in: each worker process, on its event loop. A streamed job stays with one helper, which has its
parsers' state. What a helper is sent at once is all that has come since its last answer. If a helper
ends, its streams are parsed again by the next one, from their text so far.
"""

import asyncio
import contextvars
import itertools
import logging
import os
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titopool.helpers.fork_server import ForkServer, Limits
from titopool.helpers.helper import Helper
from titopool.settings.logs import current_request
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import ID_BYTES, ChatParsing, Job, WorkerCounters
from workers.engine.parsing.helper import ParserHelper, over, plain
from workers.engine.parsing.limits import TOKEN_S, WHOLE_TOKEN_S
from workers.engine.parsing.messages import (
    Batch,
    Begin,
    End,
    Outcome,
    Past,
    Piece,
    decode_outcomes,
    encode,
)
from workers.engine.parsing.parsers import Parsed, Parsers
from workers.engine.sampling import to_vllm_params

logger = logging.getLogger(__name__)

# Pieces that a helper is sent at once, and bytes of text and ids after which no further one is: it may
# leave some for the next time, which are sent again.
MAX_BATCH, MAX_BATCH_BYTES = 1024, 2**18
# Of a batch, beside what the number of tokens allows: a helper ends a batch soon after a dear piece.
TIMEOUT_S = 60.0
# Seconds of a busy machine for a second of CPU time.
WALL_FACTOR = 3
# Of a helper, beyond what the worker has.
MAX_MEMORY_BYTES = 4 * 2**30
# Helpers for streams, and as many for whole completions, on a machine with so many cores for each.
MAX_HELPERS, CORES_OF_ONE = 4, 4

Deliver = Callable[[Parsed], None]


@dataclass
class _History:
    """Of a streamed completion: what `past` needs."""

    # Of all steps, text in UTF-8 and ids; and of each, where its text and its ids end: a token may
    # have a step of its own.
    texts: bytearray = field(default_factory=bytearray)
    ids: bytearray = field(default_factory=bytearray)
    ends: "array[int]" = field(default_factory=lambda: array("I"))
    held: list[tuple[str, bytes]] = field(default_factory=list)
    is_over: bool = False
    # Which the helper parses again with its next step.
    num_replayed: int = 0

    def past(self, job: int, index: int) -> Past:
        """For a new helper."""
        held_ids = sum(len(ids) for _, ids in self.held)
        self.num_replayed = (len(self.ids) + held_ids) // ID_BYTES
        steps, text_from, ids_from = list[tuple[str, bytes]](), 0, 0
        for text_end, ids_end in zip(self.ends[::2], self.ends[1::2], strict=True):
            text, ids = self.texts[text_from:text_end], self.ids[ids_from:ids_end]
            steps.append((text.decode(), bytes(ids)))
            text_from, ids_from = text_end, ids_end
        return Past(job, index, steps, self.held, self.is_over)

    def add(self, piece: Piece, outcome: Outcome) -> None:
        if outcome.num_steps:
            self.num_replayed = 0
        self.held.append((piece.text, piece.token_ids))
        self.is_over = outcome.is_over or self.is_over
        if self.is_over:
            self.texts, self.ids, self.ends, self.held = bytearray(), bytearray(), array("I"), []
        elif outcome.num_steps:
            last = self.held[-1:] if outcome.num_steps == 2 else []
            first = self.held[:-1] if last else self.held
            for text, ids in (_joined(first), *last):
                self.texts += text.encode()
                self.ids += ids
                self.ends.extend((len(self.texts), len(self.ids)))
            self.held = []


def _joined(pieces: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    return "".join(text for text, _ in pieces), b"".join(ids for _, ids in pieces)


class ParserProcesses:
    """The helpers of a worker: some parse streams, as many parse whole completions."""

    def __init__(self, parsers: Parsers, counters: WorkerCounters):
        try:
            # Imports what the first job needs, so that the forks have it.
            parsers.begin(ChatParsing(), to_vllm_params(SamplingOptions()), bytes(ID_BYTES))
        except Exception as error:
            logger.warning("the parsers do not take a chat without tools: %r", error)
        self._server = ForkServer(
            "titopool::parsing",
            lambda: ParserHelper(parsers).answer,
            Limits(memory_bytes=MAX_MEMORY_BYTES),
        )
        num_cores = len(os.sched_getaffinity(0))
        number = min(MAX_HELPERS, max(1, num_cores // CORES_OF_ONE))
        self._for_streams, self._for_wholes = (
            [_Lane(Helper(self._server), counters) for _ in range(number)] for _ in range(2)
        )
        self._numbers = itertools.count()

    def job(self, job: Job) -> "ParsedJob":
        """To be closed. `job` has a chat."""
        lanes = self._for_streams if job.is_streamed else self._for_wholes
        lane = min(lanes, key=lambda one: len(one.jobs))
        begin = Begin(
            next(self._numbers), bytes(job.chat), bytes(job.sampling), job.is_streamed,
            job.prompt_token_ids, current_request.get(),
        )  # fmt: skip
        return ParsedJob(lane, begin)

    def close(self) -> None:
        """Ends the helpers; from any thread."""
        for lane in (*self._for_streams, *self._for_wholes):
            lane.is_closed = True
        self._server.close()


class ParsedJob:
    """A job whose completions are parsed."""

    def __init__(self, lane: "_Lane", begin: Begin):
        self._lane, self.begin = lane, begin
        self.histories: dict[int, _History] = {}
        self.is_closed = False
        lane.jobs[begin.job] = self

    def parse(
        self, index: int, text: str, token_ids: bytes, finish_reason: str, deliver: Deliver
    ) -> None:
        """Has a piece of completion `index` parsed; `deliver` is called later, in the order of calls.

        Args:
            token_ids: int32.
        """
        if self.is_closed:
            return
        piece = Piece(self.begin.job, index, text, token_ids, finish_reason)
        self._lane.put(_Waiting(self, piece, deliver, contextvars.copy_context()))

    async def whole(self, text: str, token_ids: Any, finish_reason: str) -> Parsed:
        """The message of a completion that has ended."""
        parsed: asyncio.Future[Parsed] = asyncio.get_running_loop().create_future()

        def deliver(outcome: Parsed) -> None:
            if not parsed.done():
                parsed.set_result(outcome)

        self.parse(0, text, np.array(token_ids, np.int32).tobytes(), finish_reason, deliver)
        return await parsed

    def close(self) -> None:
        """Nothing more is parsed or delivered."""
        self.is_closed = True
        self._lane.forget(self.begin.job)


@dataclass
class _Waiting:
    """A piece that waits for its outcome."""

    job: ParsedJob
    piece: Piece
    deliver: Deliver
    context: contextvars.Context
    # Ends of the helper in which it was under way.
    num_ends: int = 0

    def timeout_s(self) -> float:
        """Of a batch whose dearest piece it is."""
        if self.job.begin.is_streamed:
            history = self.job.histories.get(self.piece.index, _History())
            cpu_s = TOKEN_S * history.num_replayed
        else:
            cpu_s = WHOLE_TOKEN_S * len(self.piece.token_ids) / ID_BYTES
        return TIMEOUT_S + WALL_FACTOR * cpu_s


class _Lane:
    """A helper, and the pieces that wait for it."""

    def __init__(self, helper: Helper, counters: WorkerCounters):
        self._helper, self._counters = helper, counters
        helper.start()
        # Its helper does not start again.
        self.is_closed = False
        self.jobs: dict[int, ParsedJob] = {}
        # By job, each in order; none is empty. The job that has had an outcome last comes last.
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._task: asyncio.Task[None] | None = None
        # Jobs that the helper has, and those of them that have ended.
        self._begun: set[int] = set()
        self._ended: list[int] = []

    def put(self, waiting: _Waiting) -> None:
        self._waiting.setdefault(waiting.piece.job, deque()).append(waiting)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def forget(self, job: int) -> None:
        del self.jobs[job]
        self._waiting.pop(job, None)
        if job in self._begun:
            self._begun.remove(job)
            self._ended.append(job)

    async def _run(self) -> None:
        try:
            while self._waiting:
                # What else this turn of the loop brings.
                await asyncio.sleep(0)
                if batch := self._next_batch():
                    await self._parse(batch)
        except Exception:
            logger.exception("text is sent unparsed")
            # Its parsers may have taken text whose outcomes never came.
            self._helper.end()
            self._begun.clear()
            while batch := self._next_batch():
                self._end_parsing(batch[0], "the worker could not parse; its log has the reason")
        finally:
            self._task = None

    def _next_batch(self) -> list[_Waiting]:
        """Pieces of all jobs in turn, so that none waits for all that another one has."""
        queues = list(self._waiting.values())
        # What may have been the cause of a helper's end comes alone, in its job's turn.
        if queues and queues[0][0].num_ends:
            return [queues[0][0]]
        batch, num_bytes = list[_Waiting](), 0
        turns = deque(iter(queue) for queue in queues if not queue[0].num_ends)
        while turns and len(batch) < MAX_BATCH and num_bytes < MAX_BATCH_BYTES:
            pieces = turns.popleft()
            if (one := next(pieces, None)) is not None:
                batch.append(one)
                num_bytes += len(one.piece.text) + len(one.piece.token_ids)
                turns.append(pieces)
        return batch

    async def _parse(self, batch: list[_Waiting]) -> None:
        request = encode(self._request(batch))
        timeout_s = max(one.timeout_s() for one in batch)
        try:
            answer = await self._helper.call_async(request, timeout_s)
        except OSError as error:
            self._begun.clear()
            if self.is_closed:
                for one in batch:
                    self._end_parsing(one, "the worker ended before the text was parsed")
                return
            has_timed_out = isinstance(error, TimeoutError)
            cause = f"it timed out after {timeout_s:.3g} s" if has_timed_out else repr(error)
            logger.warning("a process that parses is started again: %s", cause)
            self._counters.num_parser_restarts += 1
            for one in batch:
                one.num_ends += 1
            if len(batch) == 1 and batch[0].num_ends > 1:
                reason = "the process that parsed the text ended twice with it"
                reason += f": {cause}" if has_timed_out else ""
                self._end_parsing(batch[0], reason)
            return
        assert isinstance(answer, bytes)
        for one, outcome in zip(batch, decode_outcomes(answer), strict=True):
            if outcome is not None:
                self._deliver(one, outcome)

    def _request(self, batch: list[_Waiting]) -> Batch:
        parts: Batch = [End(job) for job in self._ended]
        self._ended.clear()
        for one in batch:
            job = one.job
            if job.begin.job not in self._begun:
                self._begun.add(job.begin.job)
                parts.append(job.begin)
                parts += [past.past(job.begin.job, index) for index, past in job.histories.items()]
            parts.append(one.piece)
        return parts

    def _deliver(self, one: _Waiting, outcome: Outcome) -> None:
        if one.job.is_closed:
            return
        queue = self._waiting.pop(one.piece.job)
        queue.popleft()
        if queue:
            self._waiting[one.piece.job] = queue
        if one.job.begin.is_streamed:
            one.job.histories.setdefault(one.piece.index, _History()).add(one.piece, outcome)
        if one.piece.finish_reason:
            one.job.histories.pop(one.piece.index, None)
        try:
            one.context.run(self._report, one, outcome)
        except Exception:
            logger.exception("what was parsed could not be sent")

    def _report(self, one: _Waiting, outcome: Outcome) -> None:
        if outcome.is_over:
            self._counters.num_unparsed_completions += 1
            logger.warning("%s", outcome.message["parsing_error"])
        one.deliver((outcome.message, outcome.finish_reason))

    def _end_parsing(self, one: _Waiting, reason: str) -> None:
        history = one.job.histories.get(one.piece.index, _History())
        text, _ = _joined([*history.held, (one.piece.text, b"")])
        ended = over(text, one.piece.finish_reason, reason)
        self._deliver(one, plain(one.piece) if history.is_over else ended)
