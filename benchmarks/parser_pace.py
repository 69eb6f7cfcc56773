"""Whether streams with a call keep the pace of streams without, for each tool call parser of vLLM.

    python -m benchmarks.parser_pace [--streams 64 256] [--step-ms 20] [parser …]

A stub engine gives each stream a token a step: a call with a string of 4 KiB, 840 tokens or so, which
the helpers of a worker parse (`workers/engine/parsing/`). Streams begin and end one after the other
within `SPREAD` steps. A chunk without parsing is noted when the engine makes it, and one with parsing
when its outcome is delivered, so both see the same event loop and the same machine.
"""

import argparse
import asyncio
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from benchmarks.parser_calls import Calls, Tokens, called, parsed_job
from titopool.wire.messages import WorkerCounters
from workers.engine.parsing.helper import joined
from workers.engine.parsing.parsers import Parsed, Parsers
from workers.engine.parsing.processes import ParsedJob, ParserProcesses

NUM_BYTES = 4096
SPREAD = 200
# For what is still parsed after the engine's last step.
TIMEOUT_S = 120.0


@dataclass
class Stream:
    """A stream of the stub engine, and when its chunks came; seconds of the monotonic clock."""

    job: ParsedJob
    first_step: int
    made_s: list[float] = field(default_factory=list)
    parsed_s: list[float] = field(default_factory=list)
    # Of chunks that add to the message.
    added_s: list[float] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, parsed: Parsed) -> None:
        added, finish_reason = parsed
        self.parsed_s.append(time.monotonic())
        if added:
            self.added_s.append(self.parsed_s[-1])
            self.message = joined(self.message, added)
        if finish_reason:
            self.has_ended.set()


@dataclass
class Pace:
    """Seconds between two chunks of a stream, at the 99th percentile."""

    made_s: float
    parsed_s: float
    # Between two that add to the message; NaN: the parser gives the call in one.
    added_s: float
    # From a token to its outcome, at most.
    late_s: float
    num_calls: int
    # CPU seconds of the helpers for a token.
    token_s: float

    @property
    def ratio(self) -> float:
        return self.parsed_s / self.made_s


async def run_streams(
    processes: ParserProcesses, tokens: Tokens, num_streams: int, step_s: float
) -> Pace:
    spread = min(SPREAD, len(tokens))
    streams = [
        Stream(processes.job(parsed_job(is_streamed=True)), number * spread // num_streams)
        for number in range(num_streams)
    ]
    begun_s, cpu_before_s = time.monotonic(), cpu_s()
    for step in range(spread + len(tokens)):
        await asyncio.sleep(max(0.0, begun_s + step * step_s - time.monotonic()))
        for one in streams:
            number = step - one.first_step
            if 0 <= number < len(tokens):
                text, token_id = tokens[number]
                end = "stop" if number == len(tokens) - 1 else ""
                one.made_s.append(time.monotonic())
                one.job.parse(0, text, np.int32([token_id]).tobytes(), end, one.deliver)
    async with asyncio.timeout(TIMEOUT_S):
        for one in streams:
            await one.has_ended.wait()
            one.job.close()
    return Pace(
        p99([gap for one in streams for gap in np.diff(one.made_s)]),
        p99([gap for one in streams for gap in np.diff(one.parsed_s)]),
        p99([gap for one in streams for gap in np.diff(one.added_s)]),
        max(float(np.subtract(one.parsed_s, one.made_s).max()) for one in streams),
        sum(called(one.message) for one in streams),
        (cpu_s() - cpu_before_s) / (num_streams * len(tokens)),
    )


def cpu_s() -> float:
    """CPU seconds of the helpers: no other process was started here."""
    times = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99)) if values else float("nan")


def pace(parsers: Parsers, tokens: Tokens, num_streams: int, step_s: float) -> Pace:
    """The pace of so many streams that each have `tokens`, one in `step_s` seconds."""
    processes = ParserProcesses(parsers, WorkerCounters())
    try:
        return asyncio.run(run_streams(processes, tokens, num_streams, step_s))
    finally:
        processes.close()


def main() -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    from vllm.tool_parsers import ToolParserManager

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parsers", nargs="*", default=sorted(ToolParserManager.list_registered()))
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    calls = Calls()
    print(
        "| parser | streams | p99 unparsed, parsed | ratio | pieces, p99 | latest | calls | a token |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in options.parsers:
        for num_streams in options.streams:
            try:
                found = pace(
                    calls.parsers(name),
                    calls.tokens(name, NUM_BYTES),
                    num_streams,
                    options.step_ms / 1e3,
                )
            except Exception as error:
                print(f"| `{name}` | {error.__cause__ or error!r} | | | | | |", flush=True)
                break
            print(
                f"| `{name}` | {num_streams} | {1e3 * found.made_s:.0f}, {1e3 * found.parsed_s:.0f} ms | "
                f"{found.ratio:.2f} | {1e3 * found.added_s:.0f} ms | {1e3 * found.late_s:.0f} ms | "
                f"{found.num_calls} | {1e6 * found.token_s:.0f} µs |",
                flush=True,
            )


if __name__ == "__main__":
    main()
