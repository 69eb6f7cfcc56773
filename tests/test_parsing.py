"""A failing vLLM parser does not fail a completion. Other tests use the real parsers."""

from types import SimpleNamespace
from typing import Any

from workers.engine.parsing import Parsing


class Raising:
    """A parser that fails on any text."""

    tool_parser = reasoning_parser = None

    def parse(self, *arguments: Any, **named: Any) -> Any:
        raise ValueError("no such text")

    parse_delta = parse


def test_a_failing_parser_returns_the_plain_text():
    parsers: Any = SimpleNamespace(make=lambda tools, kwargs: Raising())
    request = SimpleNamespace(tools=None, tool_choice="none", include_reasoning=True)
    parsing = Parsing(parsers, request, SimpleNamespace(), {}, [1])
    one = SimpleNamespace(text="odd", token_ids=[5], finish_reason="stop")
    assert parsing.whole(one) == ({"content": "odd"}, "stop")
    assert parsing.delta(0, "od", [5], "") == ({"content": "od"}, "")
    assert parsing.delta(0, "d", [], "stop") == ({"content": "d"}, "stop")
