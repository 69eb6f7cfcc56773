"""At which size the limit of CPU time ends the parsing of a text, for each tool call parser of vLLM.

    python -m benchmarks.parsers [parser …]

Each parser reads one call with one long string, at once and as a stream of five letters a token, and
then its own markup again and again, which is the dearest text that was found. It runs as in a helper
of a worker (`workers/engine/parsing/helper.py`), alone on its core; 64 streams share the helper.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from titopool.demo_model import make_tokenizer
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire.messages import ChatParsing
from workers.engine.parsing.helper import ParserHelper
from workers.engine.parsing.messages import Begin, End, Past, Piece, decode_outcomes, encode
from workers.engine.parsing.parsers import Parsers

KIB = 1024
MAX_BYTES = 64 * KIB
SIZES = [2**power * KIB for power in range(7)]
NUM_STREAMS = 64
WORD = "word "
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CHAT = msgspec.msgpack.encode(ChatParsing(tools=[TOOL], tool_choice="auto"))
XML = "<tool_call>\n<function=f>\n<parameter=a>\n"
KEYS = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
# What a call begins with, up to its string; of the others, as Hermes' models write it.
HEADS = {
    "deepseek_v3": DEEPSEEK + '{"a": "',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "',
    "functiongemma": "<start_function_call>call:f{a:<escape>",
    "gemma4": '<|tool_call>call:f{a:<|"|>',
    "glm45": KEYS,
    "glm47": KEYS,
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": "',
    "hunyuan_a13b": '<tool_calls>[{"name": "f", "arguments": {"a": "',
    "internlm": '<|action_start|><|plugin|>{"name": "f", "parameters": {"a": "',
    "jamba": '<tool_calls>[{"name": "f", "arguments": {"a": "',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": "',
    "lfm2": '<|tool_call_start|>[f(a="',
    "llama3_json": '{"name": "f", "parameters": {"a": "',
    "llama4_json": '{"name": "f", "parameters": {"a": "',
    "llama4_pythonic": '<|python_start|>[f(a="',
    "longcat": '<longcat_tool_call>{"name": "f", "arguments": {"a": "',
    "mimo": XML,
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">',
    "minimax_m3": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "',
    "olmo3": '<function_calls>f(a="',
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"a": "',
    "pythonic": '[f(a="',
    "qwen3_coder": XML,
    "qwen3_xml": XML,
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=a>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="f"><steptml:parameter name="a">',
    "step3p5": XML,
    "xlam": '[{"name": "f", "arguments": {"a": "',
}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "'
# Markup that is repeated, after a beginning of a call or none.
PARTS = ("<parameter=a>", "<tool_call>f\n<arg_key>", "<tool_call>{", "[f(a=", '{"a":', "a(", "[{")
MARKUP = re.compile(r"""["'](<[^"'\s{}()\\]{1,40}>|\[[A-Z_]{3,20}\])["']""")


def all_markup() -> set[str]:
    """What parsers may ask of the vocabulary."""
    import vllm

    folder = Path(vllm.__file__).parent
    return {
        found
        for name in ("parser", "tool_parsers", "reasoning")
        for path in (folder / name).rglob("*.py")
        for found in MARKUP.findall(path.read_text())
    }


class Alone:
    """The helper's code for one parser, in this process."""

    def __init__(self, parsers: Parsers):
        self._helper = ParserHelper(parsers)
        self._options = encode_options(SamplingOptions())

    def _begin(self, *, is_streamed: bool) -> Begin:
        return Begin(0, CHAT, self._options, is_streamed, np.int32([5, 6]).tobytes(), "-")

    def _answer(self, *parts: Any) -> list[Any]:
        return decode_outcomes(self._helper.answer(encode(parts)))

    def whole(self, text: str) -> tuple[bool, float]:
        """Whether the text was parsed to its end, and the CPU seconds."""
        ids = np.zeros(max(1, len(text) // len(WORD)), np.int32).tobytes()
        piece = Piece(0, 0, text, ids, "stop")
        began_s = time.process_time()
        (outcome,) = self._answer(self._begin(is_streamed=False), piece, End(0))
        return not outcome.is_over, time.process_time() - began_s

    def stream(self, pieces: Iterator[str]) -> Iterator[tuple[int, float]]:
        """After each piece until the limit, the bytes so far, and the CPU seconds."""
        others = [Past(0, index, [], [], False) for index in range(1, NUM_STREAMS)]
        self._answer(self._begin(is_streamed=True), *others)
        num_bytes, began_s, token = 0, time.process_time(), np.int32([7]).tobytes()
        for text in pieces:
            (outcome,) = self._answer(Piece(0, 0, text, token, ""))
            if outcome.is_over:
                break
            num_bytes += len(text)
            yield num_bytes, time.process_time() - began_s
        self._answer(End(0))


def largest(passes: Iterator[tuple[int, bool]]) -> str:
    """The largest size that passes before one does not."""
    last = 0
    for size, has_passed in passes:
        if not has_passed:
            return f"{last // KIB} KiB"
        last = size
    return "none"


def row_of(name: str, alone: Alone) -> str:
    head = HEADS.get(name, HERMES)

    def honest(size: int) -> str:
        return head + WORD * (size // len(WORD))

    _, whole_s = alone.whole(honest(4 * KIB))
    whole = largest((size, alone.whole(honest(size))[0]) for size in SIZES)
    pieces = iter([head, *[WORD] * (MAX_BYTES // len(WORD))])
    marks, last = {}, 0
    for last, spent_s in alone.stream(pieces):
        if last <= 4 * KIB:
            marks["4"] = spent_s
    stream = "none" if last >= MAX_BYTES - 5 else f"{last // KIB} KiB"
    hostile = dearest(alone, head)
    num_tokens = 4 * KIB // len(WORD)
    cells = [
        f"`{name}`", f"{1e3 * whole_s:.0f} ms", f"{1e6 * marks['4'] / num_tokens:.0f} µs",
        whole, stream, hostile,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def dearest(alone: Alone, head: str) -> str:
    """The markup that is too dear at the smallest of `SIZES`, and the size before."""
    found, sizes = "none", SIZES
    for start in ("", head):
        for part in (*PARTS, head):

            def passes(size: int, start: str = start, part: str = part) -> bool:
                return alone.whole(start + part * (size // len(part)))[0]

            while sizes and not passes(sizes[-1]):
                sizes = sizes[:-1]
                found = f"{(sizes or [0])[-1] // KIB} KiB: `{(start + part)[-24:]!r}`"
    return found


def main() -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    from transformers import AutoTokenizer
    from vllm.tool_parsers import ToolParserManager

    logging.disable(logging.CRITICAL)
    with TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(sorted(all_markup()))
    config = SimpleNamespace(
        model="m", hf_config=SimpleNamespace(model_type="qwen3"), max_model_len=2**17
    )
    llm = SimpleNamespace(renderer=SimpleNamespace(tokenizer=tokenizer), model_config=config)
    print("| parser | 4 KiB, whole | a token of 4 KiB | whole | stream | markup |")
    print("|---|---|---|---|---|---|")
    for name in sys.argv[1:] or sorted(ToolParserManager.list_registered()):
        try:
            alone = Alone(Parsers(name, "", llm))
        except Exception as error:
            print(f"| `{name}` | {type(error).__name__}: {str(error)[:60]} | | | | |", flush=True)
            continue
        print(row_of(name, alone), flush=True)


if __name__ == "__main__":
    main()
