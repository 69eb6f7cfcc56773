"""What a worker does with vLLM's parsers when they fail; the parsers themselves are real elsewhere."""

from types import SimpleNamespace
from typing import Any

from workers.engine.parsing import Parsing


class Raising:
    """A parser that stumbles over whatever a model writes."""

    tool_parser = reasoning_parser = None

    def parse(self, *arguments: Any, **named: Any) -> Any:
        raise ValueError("no such text")

    parse_delta = parse


def test_a_parser_that_fails_leaves_the_text():
    parsers: Any = SimpleNamespace(make=lambda tools, kwargs: Raising())
    request = SimpleNamespace(tools=None, tool_choice="none", include_reasoning=True)
    parsing = Parsing(parsers, request, SimpleNamespace(), {}, [1])
    one = SimpleNamespace(text="odd", token_ids=[5], finish_reason="stop")
    assert parsing.whole(one) == ({"content": "odd"}, "stop")
    assert parsing.delta(0, "od", [5], "") == ({"content": "od"}, "")
    assert parsing.delta(0, "d", [], "stop") == ({"content": "d"}, "stop")
