"""A failing vLLM parser does not fail a completion; thoughts that prompts open.

Other tests use the real parsers.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from titopool.demo_model import make_tokenizer
from workers.engine.parsing.parsers import Parsing
from workers.engine.parsing.thoughts import Thoughts


class Raising:
    """A parser that fails on any text."""

    tool_parser = reasoning_parser = None

    def parse(self, *arguments: Any, **named: Any) -> Any:
        raise ValueError("no such text")

    parse_delta = parse


def test_a_failing_parser_returns_the_plain_text():
    parsers: Any = SimpleNamespace(make=lambda tools, kwargs: Raising())
    request = SimpleNamespace(tools=None, tool_choice="none", include_reasoning=True)
    parsing = Parsing(parsers, request, SimpleNamespace(structured_outputs=None), {}, [1])
    assert parsing.whole("odd", [5], "stop") == ({"content": "odd"}, "stop")
    assert parsing.delta(0, "od", [5], "") == ({"content": "od"}, "")
    assert parsing.delta(0, "d", [], "stop") == ({"content": "d"}, "stop")


@pytest.mark.parametrize("is_one_token", [True, False])
def test_a_thought_is_open_until_its_end_or_that_of_its_turn(tmp_path: Path, is_one_token: bool):
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    if is_one_token:
        tokenizer.add_tokens(["<think>", "</think>"])
    thoughts = Thoughts(tokenizer, ("<think>", "</think>"), [tokenizer.eos_token_id], has_tags=True)

    def is_open(text: str) -> bool:
        return thoughts.is_open(np.array(tokenizer(text)["input_ids"], np.int32))

    assert is_open("So <think>\n")
    assert is_open("<think> one </think> and <think>")
    assert not is_open("So")
    assert not is_open("<think> one </think> two")
    assert not is_open("<think> cut off <|endoftext|> next")
    assert not thoughts.is_open(np.array([], np.int32))
