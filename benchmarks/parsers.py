"""At which size the limit of CPU time ends the parsing of a text, for each tool call parser of vLLM.

    python -m benchmarks.parsers [parser …]

Each parser reads one call with one long string, at once and as a stream of five letters a token, and
then its own markup again and again, which is the dearest text that was found. It runs as in a helper
of a worker (`workers/engine/parsing/helper.py`), alone on its core; 64 streams share the helper.
"no call": what the parser found is not the call. "too dear": the limit struck before its end.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.parser_calls import (
    CHAT,
    OPTIONS,
    PROMPT_IDS,
    WORD,
    WORD_ID,
    Calls,
    Tokens,
    called,
)
from workers.engine.parsing.helper import ParserHelper, joined
from workers.engine.parsing.messages import (
    Begin,
    End,
    Outcome,
    Past,
    Piece,
    decode_outcomes,
    encode,
)
from workers.engine.parsing.parsers import Parsers

KIB = 1024
MAX_BYTES = 64 * KIB
SIZES = [2**power * KIB for power in range(7)]
NUM_STREAMS = 64
# Markup that is repeated, after a beginning of a call or none.
PARTS = ("<parameter=a>", "<tool_call>f\n<arg_key>", "<tool_call>{", "[f(a=", '{"a":', "a(", "[{")


class Alone:
    """The helper's code for one parser, in this process."""

    def __init__(self, parsers: Parsers):
        self._helper = ParserHelper(parsers)

    def _begin(self, *, is_streamed: bool) -> Begin:
        return Begin(0, CHAT, OPTIONS, is_streamed, PROMPT_IDS, "-")

    def _answer(self, *parts: Any) -> list[Outcome]:
        return decode_outcomes(self._helper.answer(encode(parts)))

    def whole(self, text: str) -> tuple[Outcome, float]:
        """The outcome, and the CPU seconds."""
        ids = np.full(max(1, len(text) // len(WORD)), WORD_ID, np.int32).tobytes()
        piece = Piece(0, 0, text, ids, "stop")
        began_s = time.process_time()
        (outcome,) = self._answer(self._begin(is_streamed=False), piece, End(0))
        return outcome, time.process_time() - began_s

    def stream(self, tokens: Tokens) -> Iterator[tuple[Outcome, int, float]]:
        """After each token, up to the one that is too dear: its outcome, the bytes so far, and the CPU seconds."""
        others = [Past(0, index, [], [], False) for index in range(1, NUM_STREAMS)]
        self._answer(self._begin(is_streamed=True), *others)
        num_bytes, began_s = 0, time.process_time()
        for number, (text, token_id) in enumerate(tokens):
            end = "stop" if number == len(tokens) - 1 else ""
            (outcome,) = self._answer(Piece(0, 0, text, np.int32([token_id]).tobytes(), end))
            num_bytes += len(text)
            yield outcome, num_bytes, time.process_time() - began_s
            if outcome.is_over:
                break
        self._answer(End(0))


def row_of(name: str, calls: Calls, alone: Alone) -> str:
    def honest(size: int) -> str:
        return "".join(text for text, _ in calls.tokens(name, size))

    outcome, whole_s = alone.whole(honest(4 * KIB))
    whole_cell = cell_of(outcome.message, f"{1e3 * whole_s:.0f} ms")
    passed = [size for size in SIZES if not alone.whole(honest(size))[0].is_over]
    whole = "> 64 KiB" if passed == SIZES else f"{max(passed, default=0) // KIB} KiB"
    message, stream_cell, tokens = dict[str, Any](), "", calls.tokens(name, 4 * KIB)
    for outcome, _, spent_s in alone.stream(tokens):
        message, stream_cell = (
            joined(message, outcome.message),
            f"{1e6 * spent_s / len(tokens):.0f} µs",
        )
    stream_cell = cell_of(message, stream_cell)
    *_, (outcome, num_bytes, _) = alone.stream(calls.tokens(name, MAX_BYTES))
    stream = f"{num_bytes // KIB} KiB" if outcome.is_over else "> 64 KiB"
    hostile = dearest(alone, honest(KIB).partition(WORD)[0])
    cells = [f"`{name}`", whole_cell, stream_cell, whole, stream, hostile]
    return "| " + " | ".join(cells) + " |"


def cell_of(message: dict[str, Any], cost: str) -> str:
    if "parsing_error" in message:
        return "too dear"
    return cost if called(message) else "no call"


def dearest(alone: Alone, head: str) -> str:
    """The markup that is too dear at the smallest of `SIZES`, and the size before."""
    found, sizes = "> 64 KiB", SIZES
    for start in ("", head):
        for part in (*PARTS, head):

            def passes(size: int, start: str = start, part: str = part) -> bool:
                return not alone.whole(start + part * (size // len(part)))[0].is_over

            while sizes and not passes(sizes[-1]):
                sizes = sizes[:-1]
                found = f"{(sizes or [0])[-1] // KIB} KiB, `{(start + part)[-24:]!r}`"
    return found


def main() -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    from vllm.tool_parsers import ToolParserManager

    logging.disable(logging.CRITICAL)
    calls = Calls()
    print("| parser | 4 KiB, whole | a token of 4 KiB | whole | stream | markup |")
    print("|---|---|---|---|---|---|")
    for name in sys.argv[1:] or sorted(ToolParserManager.list_registered()):
        try:
            alone = Alone(calls.parsers(name))
        except Exception as error:
            print(f"| `{name}` | {error.__cause__ or error} | | | | |", flush=True)
            continue
        print(row_of(name, calls, alone), flush=True)


if __name__ == "__main__":
    main()
