"""Tools as Python functions: their schemas, the calls in a completion's text, and their answers."""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titopool.conversations.families import Said
from titopool.conversations.interface import Message

Tool = Callable[..., Any]
_THOUGHT_OR_CALL = re.compile(
    r"<think>.*?(?:</think>|\Z)|<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL
)
_HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote; `error` says what is wrong with it."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    # Of the call in the history; None: it has none.
    id: str | None = None


def hermes_calls(text: str, *, in_thoughts: bool = False) -> list[ToolCall]:
    """The calls in Hermes' form, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen's.

    A call that cannot be read has an `error`, so that the model can be told.

    Args:
        in_thoughts: also calls within `<think>…</think>`, which the model only considers.
    """
    if in_thoughts:
        return [_read_call(body) for body in _HERMES_CALL.findall(text)]
    found = _THOUGHT_OR_CALL.finditer(_without_begun_thought(text))
    return [_read_call(one[1]) for one in found if one[1] is not None]


def calls_of(said: Said, text: str) -> list[ToolCall]:
    """The calls of a turn outside of thoughts: in Hermes' form, or as the model's family writes them.

    Args:
        text: of the turn.
    """
    if said.is_thinking:
        return []
    if said.calls is None:
        return hermes_calls(text)
    functions = said.message.get("tool_calls") or ()
    calls = [
        ToolCall(call["function"]["name"], call["function"]["arguments"], error, call["id"])
        for call, (_, error) in zip(functions, said.calls, strict=True)
    ]
    if calls and all(call.error for call in calls):
        # What is wrong with a call in Hermes' form, that form says better.
        return hermes_calls(text) or calls
    return calls


def _without_begun_thought(text: str) -> str:
    """The text after a thought that the prompt has begun."""
    end = text.find("</think>")
    if end < 0 or 0 <= text.find("<think>") < end:
        return text
    for call in _HERMES_CALL.finditer(text):
        if call.start() < end < call.end() and not _read_call(call[1]).error:
            # In an argument.
            return text
    return text[end:].removeprefix("</think>")


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
        answer = {
            "role": "tool",
            "name": _clean(call.name),
            "content": _clean(_answer(call, tools)),
        }
        yield answer if call.id is None else {**answer, "tool_call_id": call.id}


def _answer(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    if call.error:
        return f"Error: {call.error}"
    if call.name not in tools:
        return f"Error: expected one of {', '.join(tools)}, got {call.name}"
    try:
        value = tools[call.name](**call.arguments)
        return value if isinstance(value, str) else _json_of(value)
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"


def _clean(text: str) -> str:
    """The text without halves of surrogate pairs, which a model's JSON may have and no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_of(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        # Keys that are no texts, or a value within itself.
        return str(value)


def check_blocking(functions: Sequence[Callable[..., Any]], name: str) -> None:
    """Raises ValueError for a coroutine function, whose call is not its answer."""
    for function in functions:
        if is_coroutine_function(function):
            raise ValueError(
                f"{name}: expected functions, got the coroutine function "
                f"{getattr(function, '__name__', function)}; use run_rollouts_async, which awaits it"
            )


def is_coroutine_function(function: Any) -> bool:
    """Also an object whose call is one."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


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
