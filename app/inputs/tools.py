"""Tools of a chat: checked, in the form in which templates get them, and for the parsers."""

from typing import Any, Literal, NamedTuple

import msgspec

from app.inputs.chat_template import Chat, check_template_kwargs
from app.schemas.generation import Message, explain
from app.schemas.openai import ChatFields
from titopool.errors import InvalidRequest
from titopool.settings.sampling import MAX_JSON_DEPTH, NonEmptyStr, is_deeper_than
from titopool.wire.messages import ChatParsing, WorkerFacts


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: NonEmptyStr
    description: str | None = None
    # A JSON schema.
    parameters: dict[str, Any] | None = None
    strict: bool | msgspec.UnsetType | None = msgspec.UNSET


class Tool(msgspec.Struct):
    """OpenAI's tool; what else a client writes into it is left out, as vLLM does."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a `tool_choice`."""

    name: NonEmptyStr


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A `tool_choice` that names what to call."""

    function: NamedFunction
    type: Literal["function"] = "function"


class Tools(NamedTuple):
    """What a chat's tools are good for."""

    # As the template gets them: vLLM's order of keys, which a template may write out.
    of_template: list[dict[str, Any]] | None
    # None: the server has no parsers.
    parsing: ChatParsing | None


def read_tools(fields: ChatFields, facts: WorkerFacts) -> Tools:
    """The tools of a body and what the parsers are to look for.

    Raises:
        InvalidRequest: a tool or the choice is malformed, or the server has no parser of calls.
    """
    tools = normalized_tools(fields.tools)
    choice = _choice(fields, [tool["function"]["name"] for tool in tools])
    if choice != "none" and not facts.tool_call_parser:
        raise InvalidRequest(
            "tools: expected none, as this server has no parser of tool calls; start it with "
            '--tool-call-parser and vLLM\'s name of one, or send "tool_choice": "none", which gives the '
            "model the tools and returns its text as it is",
            param="tools",
        )
    return Tools(tools or None, _parsing(fields, facts, tools, choice))


def normalized_tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools with the keys and the order that vLLM's server gives them.

    Raises:
        InvalidRequest: one is malformed.
    """
    tools = []
    for index, one in enumerate(given or ()):
        place = f"tools[{index}]"
        tool = _converted(one, Tool, place)
        if is_deeper_than(MAX_JSON_DEPTH, tool.function.parameters):
            raise InvalidRequest(
                f"{place}.function.parameters: expected a JSON schema of {MAX_JSON_DEPTH} levels at most, "
                "got a deeper one",
                param="tools",
            )
        function = msgspec.to_builtins(tool.function)
        if function.get("strict") is None:
            function.pop("strict", None)
        tools.append({"type": tool.type, "function": function})
    return tools


def make_chat(fields: ChatFields, messages: list[Message], tools: Tools) -> Chat:
    """What the template gets; `messages` are those of the body with uniform content."""
    check_template_kwargs(fields.chat_template_kwargs)
    if fields.add_generation_prompt and fields.continue_final_message:
        raise InvalidRequest(
            "continue_final_message: expected add_generation_prompt to be false with it",
            param="continue_final_message",
        )
    return Chat(
        messages, "messages", tools.of_template, template_kwargs(fields),
        fields.add_generation_prompt, fields.continue_final_message,
    )  # fmt: skip


def _choice(fields: ChatFields, names: list[str]) -> str | dict[str, Any]:
    choice = fields.tool_choice
    if choice is None:
        return "auto" if names else "none"
    if choice == "none":
        return choice
    if not names:
        raise InvalidRequest(
            f"tool_choice: expected none without tools, got {str(choice)[:60]!r}",
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
    named = _converted(choice, NamedTool, "tool_choice")
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
    """Variables of the template, with what vLLM makes of `reasoning_effort`."""
    if fields.reasoning_effort is None:
        return fields.chat_template_kwargs
    thinks = fields.reasoning_effort != "none"
    return {
        "enable_thinking": thinks,
        **fields.chat_template_kwargs,
        "reasoning_effort": fields.reasoning_effort,
    }


def _converted(value: Any, wanted: Any, place: str) -> Any:
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        name = place.partition("[")[0]
        raise InvalidRequest(explain(error, place), param=name) from None
