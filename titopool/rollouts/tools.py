"""Tools as Python functions: their schemas, the calls in a completion's text, and their answers."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titopool.rollouts.interface import Message

Tool = Callable[..., Any]
_HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote; `error` says what is wrong with it."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


def hermes_calls(text: str) -> list[ToolCall]:
    """The calls in Hermes' form, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen's.

    A call that cannot be read has an `error`, so that the model can be told.
    """
    return [_read_call(body) for body in _HERMES_CALL.findall(text)]


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The JSON schemas of functions, by transformers' `get_json_schema`.

    A function needs type hints, and a docstring in Google's style with a line for each argument.
    """
    from transformers.utils import get_json_schema

    return [get_json_schema(tool) for tool in tools]


def answers(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> Iterator[Message]:
    """Runs each call and yields a message of its tool.

    The model gets an error's type and text as the tool's answer: a wrong call is its own mistake,
    from which it can recover.
    """
    for call in calls:
        yield {"role": "tool", "name": call.name, "content": _answer(call, tools)}


def _answer(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    if call.error:
        return f"Error: {call.error}"
    if call.name not in tools:
        return f"Error: expected one of {', '.join(tools)}, got {call.name}"
    try:
        value = tools[call.name](**call.arguments)
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _read_call(body: str) -> ToolCall:
    try:
        read = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("unknown", {}, f"the call is not JSON: {error}")
    name = read.get("name") if isinstance(read, dict) else None
    arguments = (read.get("arguments") or {}) if isinstance(read, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("unknown", {}, 'expected {"name": …, "arguments": {…}}')
    return ToolCall(name, arguments)
