"""The helpers that parse tool calls: what ends a text's parsing ends no other's, with vLLM's parsers."""

import asyncio
import json
import os
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.parser_calls import CHAT, OPTIONS, PROMPT_IDS, Calls, parsed_job
from benchmarks.parser_pace import pace
from titopool.wire.messages import ChatParsing, WorkerCounters
from workers.engine.parsing import processes
from workers.engine.parsing.helper import ParserHelper, joined
from workers.engine.parsing.limits import TOKEN_S, TooDear
from workers.engine.parsing.messages import Begin, Outcome, Past, Piece, decode_outcomes, encode
from workers.engine.parsing.parsers import Parsed
from workers.engine.parsing.processes import ParsedJob, ParserProcesses

WORDS = ["word ", "and (", "more", ") ", "still "] * 40
CALLS = {
    "hermes": ["<tool_call>", "\n", '{"name": "f", ', '"arguments": {"a": "', *WORDS, '"}}', "\n</tool_call>"],
    "qwen3_coder": ["<tool_call>", "\n<function=f>", "\n<parameter=a>", *WORDS, "</parameter>", "\n</function>", "\n</tool_call>"],
}  # fmt: skip
# 3 s of a core for qwen3_coder, at once or in any pieces.
HOSTILE = "<tool_call>\n<function=f>" + "<parameter=a>" * 1250
TIMEOUT_S = 30.0


class Started:
    """The helpers of a parser, with what tests ask of them."""

    def __init__(self, parsers: Any):
        self.counters = WorkerCounters()
        self.processes = ParserProcesses(parsers, self.counters)

    def job(self, *, is_streamed: bool = True) -> ParsedJob:
        return self.processes.job(parsed_job(is_streamed=is_streamed))

    def pid(self) -> int:
        return self.processes._for_streams[0]._helper.pid


# With the name of a parser of vLLM's, or with parsers.
Start = Callable[[Any], Started]


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls()


@pytest.fixture
def start(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    made: list[Started] = []
    # Jobs share one, whatever the machine.
    monkeypatch.setattr(processes, "MAX_HELPERS", 1)

    def run(parsers: Any) -> Started:
        made.append(Started(calls.parsers(parsers) if isinstance(parsers, str) else parsers))
        return made[-1]

    yield run
    for one in made:
        one.processes.close()


async def stream(job: ParsedJob, pieces: list[str], pause_s: float = 0.0) -> tuple[Any, float]:
    """The joined message of a completion that comes in pieces, and the longest wait for an outcome."""
    outcomes: asyncio.Queue[tuple[Parsed, float]] = asyncio.Queue()
    for number, text in enumerate(pieces):
        end = "stop" if number == len(pieces) - 1 else ""
        began = time.monotonic()
        job.parse(
            0, text, np.int32([7]).tobytes(), end,
            lambda parsed, began=began: outcomes.put_nowait((parsed, time.monotonic() - began)),
        )  # fmt: skip
        if pause_s:
            await asyncio.sleep(pause_s)
    message: dict[str, Any] = {}
    longest_s = 0.0
    for number in range(len(pieces)):
        (added, end), took_s = await asyncio.wait_for(outcomes.get(), TIMEOUT_S)
        assert bool(end) == (number == len(pieces) - 1)
        message = joined(message, added)
        longest_s = max(longest_s, took_s)
    await asyncio.sleep(0.05)
    # Each piece has one outcome.
    assert outcomes.empty()
    job.close()
    return message, longest_s


def check_call(message: dict[str, Any]) -> None:
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"a": "".join(WORDS)}
    assert "parsing_error" not in message


@pytest.mark.parametrize("name", CALLS)
def test_streams_side_by_side_each_have_their_call(start: Start, name: str):
    started = start(name)

    async def run() -> list[tuple[Any, float]]:
        jobs = [stream(started.job(), CALLS[name]) for _ in range(4)]
        return await asyncio.gather(*jobs)

    for message, _ in asyncio.run(run()):
        check_call(message)


def test_a_whole_text_that_is_too_dear_comes_as_content(start: Start):
    started = start("qwen3_coder")

    async def run() -> tuple[Parsed, Parsed, float]:
        longest_s = 0.0

        async def turn() -> None:
            nonlocal longest_s
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                longest_s = max(longest_s, time.monotonic() - began)

        turning = asyncio.create_task(turn())
        jobs = [started.job(is_streamed=False) for _ in range(2)]
        both = await asyncio.gather(
            jobs[0].whole(HOSTILE, [7], "length"), jobs[1].whole("plain", [7], "stop")
        )
        turning.cancel()
        return *both, longest_s

    (message, end), honest, longest_s = asyncio.run(run())
    assert (message["content"], end) == (HOSTILE, "length")
    assert "within 1 s of CPU time" in message["parsing_error"]
    assert honest == ({"content": "plain"}, "stop")
    # The worker's loop goes on, and with it heartbeats.
    assert longest_s < 0.5


def test_a_stream_that_is_too_dear_ends_alone(start: Start):
    started = start("qwen3_coder")
    pieces = ["so ", HOSTILE, "rest"]

    async def run() -> list[tuple[Any, float]]:
        hostile = asyncio.create_task(stream(started.job(), pieces))
        await asyncio.sleep(0)
        honest = stream(started.job(), ["plain "] * 100, pause_s=0.01)
        return list(await asyncio.gather(hostile, honest))

    pid = started.pid()
    (dear, _), (honest, longest_s) = asyncio.run(run())
    assert "CPU time for what one step added" in dear["parsing_error"]
    assert dear["content"] == "".join(pieces)
    assert honest == {"content": "plain " * 100}
    # One step of the other, on a busy machine.
    assert longest_s < 10
    assert started.pid() == pid
    assert started.counters == WorkerCounters(num_unparsed_completions=1)


def test_a_helper_that_is_killed_is_started_again_and_streams_go_on(start: Start):
    started = start("qwen3_coder")

    async def run() -> list[tuple[Any, float]]:
        jobs = [
            asyncio.create_task(stream(started.job(), CALLS["qwen3_coder"], pause_s=0.005))
            for _ in range(3)
        ]
        await asyncio.sleep(0.3)
        os.kill(started.pid(), signal.SIGKILL)
        return await asyncio.gather(*jobs)

    for message, _ in asyncio.run(run()):
        check_call(message)
    assert started.counters == WorkerCounters(num_parser_restarts=1)


class Deadly:
    """Parsers of which one word ends the process, and another one sleeps."""

    by_token = False

    def begin(self, *_: Any) -> "Deadly":
        return self

    def delta(self, index: int, text: str, ids: list[int], finish_reason: str) -> Parsed:
        if text == "end":
            os.abort()
        if text == "sleep":
            time.sleep(60)
        return {"content": text.upper()}, finish_reason

    def whole(self, text: str, ids: list[int], finish_reason: str) -> Parsed:
        return self.delta(0, text, ids, finish_reason)


def test_a_text_that_ends_its_helper_twice_ends_alone(start: Start):
    started = start(Deadly())

    async def run() -> list[tuple[Any, float]]:
        streams = [["a"] * 20, ["a", "a", "end", "b", "b"], ["b"] * 20]
        return await asyncio.gather(*(stream(started.job(), one) for one in streams))

    first, deadly, last = (message for message, _ in asyncio.run(run()))
    assert (first, last) == ({"content": "A" * 20}, {"content": "B" * 20})
    assert deadly["content"] == "AAendbb"
    assert "ended twice" in deadly["parsing_error"]
    # Once with the others, and once alone.
    assert started.counters == WorkerCounters(num_unparsed_completions=1, num_parser_restarts=2)


class Burning:
    """A step of these parsers takes 5 ms of a core."""

    by_token = False

    def begin(self, *_: Any) -> "Burning":
        return self

    def delta(self, index: int, text: str, ids: list[int], finish_reason: str) -> Parsed:
        began = time.process_time()
        while time.process_time() < began + 0.005:
            pass
        return {"content": f"[{text}]"}, finish_reason


def test_tokens_wait_where_a_step_of_the_parser_is_dear(start: Start):
    started = start(Burning())
    message, _ = asyncio.run(stream(started.job(), ["a"] * 50 + ["<"] + ["b"] * 50))
    steps = message["content"].strip("[]").split("][")
    assert "".join(steps) == "a" * 50 + "<" + "b" * 50
    assert len(steps) < 30
    # What parsers look for comes alone.
    assert "<" in steps


def test_text_that_waits_for_a_step_comes_though_its_helper_ends(start: Start):
    class Both(Burning):
        def delta(self, index: int, text: str, ids: list[int], finish_reason: str) -> Parsed:
            if text == "<end>":
                os.abort()
            return super().delta(index, text, ids, finish_reason)

    pieces = [*(f"{number} " for number in range(40)), "<end>", "rest"]
    message, _ = asyncio.run(stream(start(Both()).job(), pieces, pause_s=0.02))
    assert message["content"].replace("[", "").replace("]", "") == "".join(pieces)
    assert "ended twice" in message["parsing_error"]


def test_text_that_waits_for_a_step_comes_though_no_parser_is_made_again():
    class TooDearToBegin(Burning):
        def begin(self, *_: Any) -> Burning:
            raise TooDear

    begin = Begin(0, CHAT, OPTIONS, True, PROMPT_IDS, "-")
    past = Past(0, 0, [], [("so ", b"")], is_over=False)
    batch = [begin, past, Piece(0, 0, "on", b"", "stop")]
    (outcome,) = decode_outcomes(ParserHelper(TooDearToBegin()).answer(encode(batch)))
    assert outcome is not None
    assert outcome.message["content"] == "so on"


def answered(helper: ParserHelper, texts: list[str]) -> list[Outcome | None]:
    """The outcomes of one batch, a piece for each of as many jobs."""
    ids = np.int32([7]).tobytes()
    pieces = [Piece(number, 0, text, ids, "") for number, text in enumerate(texts)]
    return decode_outcomes(helper.answer(encode(pieces)))


def begun(number: int) -> ParserHelper:
    """A helper's code in this process, with so many streams that have had a step each."""
    helper = ParserHelper(Burning())
    begins = [Begin(one, CHAT, OPTIONS, True, PROMPT_IDS, "-") for one in range(number)]
    helper.answer(encode(begins))
    for one in range(number):
        helper.answer(encode([Piece(one, 0, "a", np.int32([7]).tobytes(), "")]))
    return helper


def test_streams_that_are_due_at_once_take_turns():
    helper, num_steps = begun(20), list[int]()
    for _ in range(30):
        outcomes = answered(helper, ["b"] * 20)
        # Every chunk comes at once, whoever's step it is.
        assert None not in outcomes
        num_steps.append(sum(one.num_steps for one in outcomes))
    assert max(num_steps) <= 4
    assert sum(num_steps) >= 20


def test_plain_text_does_not_wait_for_others_markup():
    helper = begun(20)
    outcomes = answered(helper, ["<"] * 10 + ["b"] * 10)
    late = outcomes.index(None)
    # What there is time for comes first, and one step may go beyond.
    assert 1 <= late <= 6
    assert outcomes[late:10] == [None] * (10 - late)
    assert outcomes[10:] == [Outcome({}, "", num_steps=0)] * 10


def test_no_more_text_waits_than_one_step_has_time_for():
    class ByLetters(Burning):
        """A letter takes 10 ms: a step of 25 is too dear."""

        def delta(self, index: int, text: str, ids: list[int], finish_reason: str) -> Parsed:
            for _ in text:
                super().delta(index, text, ids, finish_reason)
                super().delta(index, text, ids, finish_reason)
            return {"content": text}, finish_reason

    helper, message = ParserHelper(ByLetters()), dict[str, Any]()
    helper.answer(encode([Begin(0, CHAT, OPTIONS, True, PROMPT_IDS, "-")]))
    piece = Piece(0, 0, "a", np.int32([7]).tobytes(), "")
    for _ in range(60):
        for one in decode_outcomes(helper.answer(encode([piece]))):
            assert one is not None
            message = joined(message, one.message)
    assert "parsing_error" not in message
    # The last ones wait, unless the machine was slow.
    assert 20 < len(message["content"]) <= 60


def test_what_a_batch_has_no_time_for_keeps_its_order(start: Start):
    started = start(Burning())

    async def run() -> list[tuple[Any, float]]:
        pieces = ["<", "a", ">", "b", "|"] * 4
        return await asyncio.gather(*(stream(started.job(), pieces) for _ in range(12)))

    for message, _ in asyncio.run(run()):
        assert message["content"].replace("[", "").replace("]", "") == "<a>b|" * 4


def test_a_text_with_which_its_helper_hangs_ends_for_that_reason(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "TIMEOUT_S", 1.0)
    message, _ = asyncio.run(stream(start(Deadly()).job(), ["sleep", "a"]))
    assert message["content"] == "sleepa"
    assert "ended twice with it: it timed out after 1 s" in message["parsing_error"]


def test_another_job_s_text_waits_for_one_of_many_dear_ones(start: Start):
    class Dear(Deadly):
        """A text takes more than a batch may."""

        def whole(self, text: str, ids: list[int], finish_reason: str) -> Parsed:
            began = time.process_time()
            while text == "dear" and time.process_time() < began + 0.04:
                pass
            return super().whole(text, ids, finish_reason)

    started = start(Dear())

    async def run() -> int:
        hostile, honest = started.job(is_streamed=False), started.job(is_streamed=False)
        dear = [asyncio.create_task(hostile.whole("dear", [7], "stop")) for _ in range(16)]
        await asyncio.sleep(0)
        await asyncio.wait_for(honest.whole("plain", [7], "stop"), TIMEOUT_S)
        before = sum(one.done() for one in dear)
        await asyncio.wait_for(asyncio.gather(*dear), TIMEOUT_S)
        return before

    assert asyncio.run(run()) <= 2


def test_another_job_s_text_waits_for_one_of_many_that_end_their_helper(start: Start):
    started = start(Deadly())

    async def run() -> int:
        hostile, honest = started.job(is_streamed=False), started.job(is_streamed=False)
        waiting = hostile._lane._waiting
        deadly = [asyncio.create_task(hostile.whole("end", [7], "stop")) for _ in range(8)]
        await asyncio.sleep(0)
        # All of them are suspects then, and the other one is not.
        while not waiting[hostile.begin.job][-1].num_ends:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(honest.whole("plain", [7], "stop"), TIMEOUT_S)
        before = sum(one.done() for one in deadly)
        await asyncio.wait_for(asyncio.gather(*deadly), TIMEOUT_S)
        return before

    assert asyncio.run(run()) <= 2


def test_what_a_stream_keeps_for_a_new_helper_is_small():
    history, ids = processes._History(), np.int32([7]).tobytes()
    texts = [f"w{number} ü" for number in range(10_000)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for text in texts:
        history.add(Piece(0, 0, text, ids, ""), Outcome({}, ""))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Text, ids and their lengths: 20 bytes, and what buffers have in reserve.
    assert (after - before) / len(texts) < 30
    history.add(Piece(0, 0, "held ", ids, ""), Outcome({}, "", num_steps=0))
    history.add(Piece(0, 0, "held", ids, ""), Outcome({}, "", num_steps=0))
    history.add(Piece(0, 0, "<", ids, ""), Outcome({}, "", num_steps=2))
    history.add(Piece(0, 0, "more", ids, ""), Outcome({}, "", num_steps=0))
    steps = [*((text, ids) for text in texts), ("held held", ids * 2), ("<", ids)]
    assert history.past(3, 4) == Past(3, 4, steps, [("more", ids)], is_over=False)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_jobs_are_shared_out_among_helpers(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
):
    monkeypatch.setattr(processes, "MAX_HELPERS", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    started = start(Deadly())

    async def run() -> list[ParsedJob]:
        return [started.job(is_streamed=is_streamed) for _ in range(6)]

    lanes = {id(job._lane): len(job._lane.jobs) for job in asyncio.run(run())}
    assert list(lanes.values()) == [2, 2, 2]


def test_a_batch_has_no_more_than_a_bound_of_text(start: Start, monkeypatch: pytest.MonkeyPatch):
    started, sizes = start(Deadly()), list[int]()
    number, text, ids = 64, "abcd " * 4096, [7] * 4096

    async def run() -> list[Parsed]:
        job = started.job(is_streamed=False)
        helper = job._lane._helper
        call_async = helper.call_async

        def noted(request: bytes, timeout_s: float) -> Any:
            sizes.append(len(request))
            return call_async(request, timeout_s)

        monkeypatch.setattr(helper, "call_async", noted)
        return await asyncio.gather(*(job.whole(text, ids, "stop") for _ in range(number)))

    assert asyncio.run(run()) == [({"content": text.upper()}, "stop")] * number
    assert max(sizes) < processes.MAX_BATCH_BYTES + 2**16
    # A bit more than one piece each.
    assert len(sizes) <= number // 4


def test_a_batch_has_time_for_the_tokens_that_are_parsed_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    started = start(Deadly())
    helper, timeouts = started.processes._for_streams[0]._helper, list[float]()
    call_async = helper.call_async

    def noted(request: bytes, timeout_s: float) -> Any:
        timeouts.append(timeout_s)
        return call_async(request, timeout_s)

    monkeypatch.setattr(helper, "call_async", noted)
    ids = np.zeros(1000, np.int32).tobytes()

    async def run() -> None:
        job, outcomes = started.job(), asyncio.Queue[Parsed]()

        async def parse(index: int) -> None:
            job.parse(index, "(", ids, "", outcomes.put_nowait)
            await asyncio.wait_for(outcomes.get(), TIMEOUT_S)

        await parse(0)
        await parse(1)
        os.kill(started.pid(), signal.SIGKILL)
        # The second one's past comes with the first one's piece, and is parsed with its own.
        await parse(0)
        await parse(1)
        await parse(1)

    asyncio.run(run())
    usual, longer = processes.TIMEOUT_S, processes.TIMEOUT_S + 1000 * 3 * TOKEN_S
    assert timeouts[:2] == [usual, usual]
    assert timeouts[-3:] == [longer, longer, usual]


def test_an_error_of_the_worker_leaves_no_parser_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    started = start(Deadly())
    before = started.pid()

    def fails(_: bytes) -> Any:
        raise ValueError("not an answer")

    async def run() -> tuple[Any, Any]:
        with monkeypatch.context() as patched:
            patched.setattr(processes, "decode_outcomes", fails)
            first, _ = await stream(started.job(), ["a", "b"])
        return first, (await stream(started.job(), ["a", "b"]))[0]

    first, second = asyncio.run(run())
    assert first["content"] == "ab"
    assert "the worker could not parse" in first["parsing_error"]
    assert second == {"content": "AB"}
    assert started.pid() != before
    # By completion, not by piece.
    assert started.counters.num_unparsed_completions == 1


def test_a_job_whose_parsers_end_their_helper_ends_it_twice(start: Start):
    class DeadlyToBegin(Deadly):
        def begin(self, chat: ChatParsing, *_: Any) -> Deadly:
            if chat.tools:
                os.abort()
            return self

    started = start(DeadlyToBegin())
    message, _ = asyncio.run(stream(started.job(), ["a", "b", "c", "d"], pause_s=0.5))
    assert message["content"] == "abcd"
    assert started.counters == WorkerCounters(num_unparsed_completions=1, num_parser_restarts=2)


def test_a_closed_job_s_text_is_not_queued(start: Start):
    started = start(Deadly())

    async def run() -> None:
        job = started.job()
        job.close()
        job.parse(0, "a", b"", "", lambda _: None)
        assert started.processes._for_streams[0]._task is None

    asyncio.run(run())


def test_parsers_that_refuse_a_plain_chat_end_no_start(start: Start):
    class Refusing(Deadly):
        def begin(self, chat: ChatParsing, *_: Any) -> Deadly:
            if not chat.tools:
                raise AssertionError("tools, please")
            return self

    assert asyncio.run(stream(start(Refusing()).job(), ["a"]))[0] == {"content": "A"}


def test_the_end_of_a_worker_is_no_new_start(start: Start, caplog: pytest.LogCaptureFixture):
    started = start(Deadly())

    async def run() -> Any:
        job = asyncio.create_task(stream(started.job(), ["sleep"]))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(started.processes.close)
        return (await job)[0]

    assert "the worker ended" in asyncio.run(run())["parsing_error"]
    assert "started again" not in caplog.text


@pytest.mark.parametrize("name", CALLS)
def test_streams_with_calls_keep_the_pace_of_streams_without(calls: Calls, name: str):
    """A machine that does other work slows both: on two quiet cores the ratio is 1.1."""
    tokens = calls.tokens(name, 512)
    found = pace(calls.parsers(name), tokens, num_streams=16, step_s=0.02)
    assert found.num_calls == 16
    assert found.ratio < 5, found
