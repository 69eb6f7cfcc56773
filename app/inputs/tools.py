"""Checks a chat's tools and prepares them for the chat template and for vLLM's parsers."""

from typing import Any, Literal, NamedTuple

import msgspec

from app.inputs.chat_template import Chat
from app.route.decoding import beginning, convert
from app.route.fields import ChatFields, Message
from titopool.errors import InvalidRequest
from titopool.settings.grammars import (
    MAX_JSON_DEPTH,
    NonEmptyStr,
    exceeded_by_schema,
    is_deeper_than,
)
from titopool.wire.messages import ChatParsing, WorkerFacts


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: NonEmptyStr
    description: str | None = None
    # A JSON schema.
    parameters: dict[str, Any] | None = None
    strict: bool | msgspec.UnsetType | None = msgspec.UNSET


class Tool(msgspec.Struct):
    """OpenAI's tool. Unknown fields are dropped, as in vLLM."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a `tool_choice`."""

    name: NonEmptyStr


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A `tool_choice` that names the function to call."""

    function: NamedFunction
    type: Literal["function"] = "function"


class Tools(NamedTuple):
    """A chat's tools for each of their readers."""

    # With vLLM's order of keys, because a template may print them; None without tools.
    for_template: list[dict[str, Any]] | None
    # For the worker; None if the server has no parsers.
    parsing: ChatParsing | None


def read_tools(fields: ChatFields, facts: WorkerFacts) -> Tools:
    """The tools and the tool choice of a body.

    Raises:
        InvalidRequest: a tool or the choice is malformed, or the server has no tool call parser.
    """
    tools = normalized_tools(fields.tools)
    choice = _choice(fields, [tool["function"]["name"] for tool in tools])
    if choice != "none" and not facts.tool_call_parser:
        raise InvalidRequest(
            "tools: expected none, as this server has no tool call parser; start the server with "
            '--tool-call-parser and the name of one of vLLM\'s parsers, or send "tool_choice": "none", '
            "so that the model sees the tools and its text is returned unparsed",
            param="tools",
        )
    return Tools(tools or None, _parsing(fields, facts, tools, choice))


def normalized_tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools with the keys that vLLM's server keeps, in vLLM's order.

    Raises:
        InvalidRequest: a tool is malformed.
    """
    tools = []
    for index, one in enumerate(given or ()):
        location = f"tools[{index}]"
        tool = convert(one, Tool, location)
        if is_deeper_than(MAX_JSON_DEPTH, tool.function.parameters):
            raise InvalidRequest(
                f"{location}.function.parameters: expected a JSON schema with at most "
                f"{MAX_JSON_DEPTH} levels, got a deeper one; flatten it",
                param="tools",
            )
        if problem := exceeded_by_schema(tool.function.parameters):
            raise InvalidRequest(
                f"{location}.function.parameters: expected {problem}", param="tools"
            )
        function = msgspec.to_builtins(tool.function)
        if function.get("strict") is None:
            function.pop("strict", None)
        tools.append({"type": tool.type, "function": function})
    return tools


def make_chat(fields: ChatFields, messages: list[Message], tools: Tools) -> Chat:
    """The chat to render; `messages` are the body's, with uniform content.

    `Chat` checks the arguments of the template.
    """
    return Chat(
        messages, "messages", tools.for_template, template_kwargs(fields),
        fields.add_generation_prompt, fields.continue_final_message, fields.chat_template,
    )  # fmt: skip


def _choice(fields: ChatFields, names: list[str]) -> str | dict[str, Any]:
    choice = fields.tool_choice
    if choice is None:
        return "auto" if names else "none"
    if choice == "none":
        return choice
    if not names:
        raise InvalidRequest(
            f"tool_choice: expected none without tools, got {beginning(choice, 60, str)!r}; send tools",
            param="tool_choice",
        )
    if isinstance(choice, str):
        if choice not in ("auto", "required"):
            raise InvalidRequest(
                'tool_choice: expected none, auto, required or {"type": "function", "function": {"name": …}}, '
                f"got {choice[:60]!r}",
                param="tool_choice",
            )
        return choice
    named = convert(choice, NamedTool, "tool_choice")
    if named.function.name not in names:
        raise InvalidRequest(
            f"tool_choice: expected one of the tools ({', '.join(names)[:200]}), got "
            f"{named.function.name[:60]!r}",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": named.function.name}}


def _parsing(
    fields: ChatFields,
    facts: WorkerFacts,
    tools: list[dict[str, Any]],
    choice: str | dict[str, Any],
) -> ChatParsing | None:
    if not facts.tool_call_parser and not facts.reasoning_parser:
        return None
    calls = [message.get("tool_calls") for message in fields.messages]
    return ChatParsing(
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=fields.parallel_tool_calls,
        include_reasoning=fields.include_reasoning,
        chat_template_kwargs=template_kwargs(fields),
        num_past_calls=sum(len(one) for one in calls if isinstance(one, list)),
    )


def template_kwargs(fields: ChatFields) -> dict[str, Any]:
    """The template's variables; `reasoning_effort` becomes two of them, as in vLLM."""
    if fields.reasoning_effort is None:
        return fields.chat_template_kwargs
    thinks = fields.reasoning_effort != "none"
    return {
        "enable_thinking": thinks,
        **fields.chat_template_kwargs,
        "reasoning_effort": fields.reasoning_effort,
    }
