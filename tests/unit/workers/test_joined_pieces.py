"""vLLM's parsers make of pieces that the helpers join what they make of single tokens."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.parser_calls import CALLS, HERMES, OPTIONS, PROMPT_IDS, TOOL, WORD_ID, Calls, Tokens
from titopool.errors import ConfigError
from titopool.wire.messages import ChatParsing
from workers.engine.parsing import helper
from workers.engine.parsing.helper import Completion, ParserHelper, joined
from workers.engine.parsing.messages import Begin, Piece, decode_outcomes, encode
from workers.engine.parsing.parsers import Parsers

CHAT = msgspec.msgpack.encode(
    ChatParsing(
        tools=[TOOL], tool_choice="auto",
        chat_template_kwargs={
            "thinking": True, "enable_thinking": True, "reasoning_effort": "high"
        },
    )
)  # fmt: skip
SIZES = (2, 3, 4, 5, 7, 8, 16, 256)
THOUGHT, ANSWER = "I add: six and seven Here is it, and Here is more.", "It is: thirteen, not"
# A thought and an answer as each reasoning parser of vLLM 0.32 reads it, if not in the common form.
COMMON = f"<think>{THOUGHT}</think>{ANSWER}"
THOUGHTS = {
    "gemma4": f"<|channel>thought\n{THOUGHT}<channel|>{ANSWER}",
    "granite": f"Here is my thought process: {THOUGHT} Here is my response: {ANSWER}",
    "inkling": f"<|content_thinking|>{THOUGHT}<|end_message|><|content_text|>{ANSWER}",
    "k2_horizon": f"<ifm|think>{THOUGHT}</ifm|think>{ANSWER}",
    "kimi_k3": f"<|open|>think<|sep|>{THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>{ANSWER}",
    "minimax_m3": f"<mm:think>{THOUGHT}</mm:think>{ANSWER}",
    "muse_glimmer": f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>{ANSWER}",
    "plamo3": f"<|plamo:begin_think:plamo|>{THOUGHT}<|plamo:end_think:plamo|>{ANSWER}",
    "seed_oss": f"<seed:think>{THOUGHT}</seed:think>{ANSWER}",
}
# Hunyuan's parser knows its markup by ids, one for each of these.
HUNYUAN = [
    ("<th", 14023), ("ink", 771), (">\n", 397), *((f"{word} ", WORD_ID) for word in THOUGHT.split()),
    ("\n", 198), ("</", 524), ("think", 27963), (">\n", 397), ("<", 27), ("answer", 9399), (">\n", 397),
    *((f"{word} ", WORD_ID) for word in ANSWER.split()),
]  # fmt: skip
# Those that take all as content here: the form comes with the tokenizer, or the thought's text stays.
WITHOUT_A_THOUGHT = {"hf", "mistral", "minimax_m2_append_think", "openai_gptoss"}
# Markers that the packages of a model's own have.
NOT_INSTALLED = {"cohere_command3", "cohere_command4"}


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls()


def streamed(
    parsers: Parsers, tokens: Tokens, size: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The message of a stream of whose ordinary tokens up to `size` are one step."""
    monkeypatch.setattr(
        Completion,
        "holds",
        lambda self, piece, *_: len(self.held) + 1 < size and helper.is_ordinary(piece),
    )
    # First uses compile and import.
    for limit in ("BATCH_S", "STEP_S", "COMPLETION_S"):
        monkeypatch.setattr(helper, limit, 60.0)
    begin = Begin(0, CHAT, OPTIONS, True, PROMPT_IDS, "-")
    pieces = [Piece(0, 0, text, np.int32([one]).tobytes(), "") for text, one in tokens]
    pieces.append(Piece(0, 0, "", b"", "stop"))
    message: dict[str, Any] = {}
    for one in decode_outcomes(ParserHelper(parsers).answer(encode([begin, *pieces]))):
        assert one is not None
        message = joined(message, one.message)
    for call in message.get("tool_calls", ()):
        # Made at random.
        call.pop("id", None)
    return message


def check(parsers: Parsers, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    single = streamed(parsers, tokens, 1, monkeypatch)
    for size in SIZES:
        assert streamed(parsers, tokens, size, monkeypatch) == single, size
    return single


def test_a_thought_s_pieces_may_be_joined(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    from vllm.reasoning import ReasoningParserManager

    for name in ReasoningParserManager.list_registered():
        try:
            parsers = calls.parsers("", name)
        except ConfigError:
            assert name in NOT_INSTALLED
            continue
        is_hunyuan = name == "hunyuan_a13b"
        tokens = HUNYUAN if is_hunyuan else calls.words(THOUGHTS.get(name, COMMON))
        message = check(parsers, tokens, monkeypatch)
        if name not in WITHOUT_A_THOUGHT:
            assert "seven" in message["reasoning"], name
            assert re.fullmatch(r"\s*It is: thirteen, not\s*", message["content"]), name


def test_a_call_s_pieces_may_be_joined(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    from vllm.tool_parsers import ToolParserManager

    for name in ToolParserManager.list_registered():
        if name not in NOT_INSTALLED:
            call = CALLS.get(name, HERMES).replace("…", "word and: more of it")
            check(calls.parsers(name), calls.words(call), monkeypatch)
