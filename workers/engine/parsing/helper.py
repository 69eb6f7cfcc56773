"""Parses batches of what a worker's completions have gained.

Runs in: the helpers that parse. They are forks of the worker, so they have vLLM's parsers.
"""

from typing import Any

import msgspec
import numpy as np

from titopool.settings.logs import current_request
from titopool.settings.sampling import decode_options
from titopool.wire.messages import decode_chat_parsing
from workers.engine.parsing.limits import (
    COMPLETION_S,
    STEP_S,
    TOKEN_S,
    CpuLimit,
    TooDear,
    limit_of_whole_s,
)
from workers.engine.parsing.messages import Begin, End, Outcome, Past, Piece, decode_batch, encode
from workers.engine.parsing.parsers import Parsed, Parsers, Parsing
from workers.engine.sampling import to_vllm_params

# CPU seconds that all streams of a helper may take for a token of each, and that one may take.
ROUND_S, ONE_S = 0.01, 0.0005
# CPU seconds of parsers after which what no parser may hold waits for the next batch.
BATCH_S = 0.02
# The weight of the last step in the average.
NEWEST = 1 / 16
# Tokens of one step, at most, and the CPU seconds that it may be expected to take.
MAX_HELD, HELD_S = 256, STEP_S / 4
# What parsers look for, a colon in granite's reasoning. Some of them take it one token at a time, and
# lose what comes with another.
MARKUP = frozenset("<>{}[]()|｜\"':\n")


class Completion:
    """A streamed completion: its text waits until a step of its parser pays."""

    def __init__(self) -> None:
        # As in `Past`.
        self.steps: list[tuple[str, bytes]] = []
        self.is_over = False
        # Pieces that wait for the next step.
        self.held: list[tuple[str, bytes]] = []
        self.spent_s, self.num_tokens = 0.0, 0
        # CPU seconds of a step and of a token, on average: some kernels count in ticks of 4 ms.
        self.step_s = self.token_s = 0.0

    def holds(self, piece: Piece, num_streams: int, spent_s: float) -> bool:
        """Whether the piece may wait: one token of each stream takes `ROUND_S` at most.

        Where several streams are due at once, those wait that come after `spent_s`, CPU seconds of
        their batch, is as much.
        """
        allowed_s = min(ONE_S, ROUND_S / num_streams)
        # Some parsers take a text by letters: for them a step of many tokens saves nothing.
        num_tokens = min(MAX_HELD, HELD_S / self.token_s) if self.token_s else 1
        if spent_s <= ROUND_S:
            num_tokens = min(num_tokens, self.step_s / allowed_s)
        return len(self.held) + 1 < num_tokens and is_ordinary(piece)

    def take_held(self) -> list[tuple[str, bytes]]:
        """What waits, as one step; empty if nothing does."""
        held, self.held = self.held, []
        return [("".join(text for text, _ in held), b"".join(ids for _, ids in held))][: len(held)]


def is_ordinary(piece: Piece) -> bool:
    """Whether a parser may take the piece together with others."""
    # A token without text may be a marker that is not shown.
    return bool(piece.text) and not piece.finish_reason and MARKUP.isdisjoint(piece.text)


class Job:
    """A job whose completions are parsed; its parsers are made for the first piece."""

    def __init__(self, begin: Begin):
        self.begin = begin
        # The reason, if its parsers cannot be made.
        self.parsing: Parsing | str | None = None
        # Those that go on, of a streamed job.
        self.completions: dict[int, Completion] = {}


class ParserHelper:
    """The parsers of the jobs that a helper has; `answer` is its work."""

    def __init__(self, parsers: Parsers):
        self._parsers = parsers
        self._limit = CpuLimit()
        self._jobs: dict[int, Job] = {}

    def answer(self, request: bytes) -> bytes:
        """The outcomes of a batch's pieces; both are encoded.

        One at least has an outcome. A piece without one comes again, with what its job has after it.
        """
        outcomes: list[Outcome | None] = []
        self._limit.spent_s, late_jobs = 0.0, set[int]()
        num_streams = sum(len(job.completions) for job in self._jobs.values())
        for one in decode_batch(request):
            if isinstance(one, Begin):
                self._jobs[one.job] = Job(one)
            elif isinstance(one, Past):
                completion = Completion()
                completion.steps, completion.is_over = one.steps, one.is_over
                completion.held = one.held
                self._jobs[one.job].completions[one.index] = completion
            elif isinstance(one, End):
                self._jobs.pop(one.job, None)
            elif one.job in late_jobs:
                outcomes.append(None)
            else:
                outcomes.append(self._outcome(self._jobs[one.job], one, max(1, num_streams)))
                if outcomes[-1] is None:
                    late_jobs.add(one.job)
        return encode(outcomes)

    def _begun(self, begin: Begin) -> Parsing | str:
        options = decode_options(begin.sampling)
        params = to_vllm_params(options, is_streamed=begin.is_streamed)
        chat = decode_chat_parsing(begin.chat)
        try:
            return self._limit.call(
                COMPLETION_S, lambda: self._parsers.begin(chat, params, begin.prompt_token_ids)
            )
        except TooDear:
            return too_dear(COMPLETION_S)

    def _outcome(self, job: Job, piece: Piece, num_streams: int) -> Outcome | None:
        """None: the batch has no time for it."""
        # Log lines name the request.
        current_request.set(job.begin.request)
        has_time = self._limit.spent_s < BATCH_S
        completion = job.completions.setdefault(piece.index, Completion())
        # Parsers that have ended a helper while they were made are not made again.
        if job.parsing is None and not completion.is_over:
            if not has_time:
                return None
            job.parsing = self._begun(job.begin)
        if not completion.is_over and not isinstance(job.parsing, str):
            may_wait = not self._parsers.by_token
            if may_wait and completion.holds(piece, num_streams, self._limit.spent_s):
                completion.held.append((piece.text, piece.token_ids))
                return Outcome({}, "", num_steps=0)
            if not has_time:
                return None
        if piece.finish_reason:
            del job.completions[piece.index]
        if completion.is_over:
            return plain(piece)
        assert job.parsing is not None
        if isinstance(job.parsing, str):
            held = "".join(text for text, _ in completion.take_held())
            outcome = over(held + piece.text, piece.finish_reason, job.parsing)
        elif job.begin.is_streamed:
            outcome = self._delta(job.parsing, completion, piece)
        else:
            outcome = self._whole(job.parsing, piece)
        completion.is_over = outcome.is_over
        return outcome

    def _whole(self, parsing: Parsing, piece: Piece) -> Outcome:
        token_ids = ids_of(piece.token_ids)
        limit_s = limit_of_whole_s(len(token_ids))
        try:
            parsed = self._limit.call(
                limit_s, lambda: parsing.whole(piece.text, token_ids, piece.finish_reason)
            )
        except TooDear:
            return over(piece.text, piece.finish_reason, too_dear(limit_s))
        return Outcome(*parsed)

    def _delta(self, parsing: Parsing, completion: Completion, piece: Piece) -> Outcome:
        index, text, finish_reason = piece.index, piece.text, ""
        if is_ordinary(piece):
            completion.held.append((text, piece.token_ids))
            steps = completion.take_held()
        else:
            steps = [*completion.take_held(), (text, piece.token_ids)]
        num_steps, message = len(steps), dict[str, Any]()
        try:
            past, completion.steps = completion.steps, []
            for step in past:
                self._step(parsing, completion, index, *step)
            while steps:
                end = piece.finish_reason if len(steps) == 1 else ""
                added, finish_reason = self._step(parsing, completion, index, *steps[0], end)
                message = joined(message, added)
                del steps[0]
        except TooDear as error:
            rest = over("".join(text for text, _ in steps), piece.finish_reason, str(error))
            return msgspec.structs.replace(rest, message=joined(message, rest.message))
        return Outcome(message, finish_reason, num_steps)

    def _step(
        self,
        parsing: Parsing,
        completion: Completion,
        index: int,
        text: str,
        token_ids: bytes,
        finish_reason: str = "",
    ) -> Parsed:
        ids = ids_of(token_ids)
        completion.num_tokens += len(ids)
        limit_s = COMPLETION_S + TOKEN_S * completion.num_tokens
        if completion.spent_s > limit_s:
            raise TooDear(too_dear(limit_s))
        try:
            parsed = self._limit.call(
                STEP_S, lambda: parsing.delta(index, text, ids, finish_reason)
            )
        except TooDear:
            raise TooDear(too_dear(STEP_S, " for what one step added")) from None
        completion.spent_s += self._limit.took_s
        completion.step_s += (self._limit.took_s - completion.step_s) * NEWEST
        token_s = self._limit.took_s / max(1, len(ids))
        completion.token_s += (token_s - completion.token_s) * NEWEST
        return parsed


def ids_of(token_ids: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(token_ids, np.int32).tolist()
    return ids


def too_dear(limit_s: float, part: str = "") -> str:
    return (
        f"expected text that the parsers of tool calls and reasoning take within {limit_s:.2g} s of CPU "
        f"time{part}, got one that takes more; from here on the text is not parsed"
    )


def over(text: str, finish_reason: str, reason: str) -> Outcome:
    """The end of a completion's parsing: the text as it is, and the reason."""
    message = {"content": text, "parsing_error": reason}
    return Outcome(message, finish_reason, is_over=True)


def plain(piece: Piece) -> Outcome:
    """The outcome of a piece whose completion's parsing has ended before."""
    return Outcome({"content": piece.text} if piece.text else {}, piece.finish_reason)


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two deltas in OpenAI's nesting as one."""
    message = {**first, **second}
    for name in ("content", "reasoning"):
        if first.get(name) and second.get(name):
            message[name] = first[name] + second[name]
        elif first.get(name):
            message[name] = first[name]
    calls = [*first.get("tool_calls", ())]
    for call in second.get("tool_calls", ()):
        if calls and calls[-1]["index"] == call["index"]:
            before, after = calls[-1].get("function") or {}, call.get("function") or {}
            arguments = (before.get("arguments") or "") + (after.get("arguments") or "")
            calls[-1] = {
                **calls[-1],
                **call,
                "function": {**before, **after, "arguments": arguments},
            }
        else:
            calls.append(call)
    return message | ({"tool_calls": calls} if calls else {})
