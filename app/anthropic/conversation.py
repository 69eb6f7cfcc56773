"""A conversation in Anthropic's form as one of OpenAI's, which chat templates read.

A user's message may have results of tools, which are messages of their own; a thought, a text and calls
of tools are one message, as they were sampled in one turn.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from app.anthropic.bodies import ConversationFields, ToolChoice
from app.route.decoding import shown
from app.route.fields import ChatFields, Message
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest

# Claude Code's first block of `system`: a digest of the request for Anthropic's accounts, which would
# make every prompt new to the prefix cache.
BILLING = "x-anthropic-billing-header"
# Where arguments stand that are no object of JSON, as Anthropic's documents advise.
INVALID_JSON = "INVALID_JSON"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(fields: ConversationFields) -> ChatFields:
    """The chat that a body asks for.

    Raises:
        InvalidRequest: a message, a block or a tool is malformed, or of a type that is not served.
    """
    messages = []
    if fields.system and (parts := _system_parts(fields.system, "system")):
        messages.append({"role": "system", "content": parts})
    for index, message in enumerate(sharing_time(fields.messages)):
        messages += _translated(message, f"messages[{index}]")
    is_continued = bool(messages) and messages[-1]["role"] == "assistant"
    if is_continued and (messages[-1].get("tool_calls") or not messages[-1]["content"]):
        raise InvalidRequest(
            f"messages[{len(fields.messages) - 1}]: expected a last message of the assistant that has a "
            "text and no tool_use, as the answer goes on from it, got another; send the tools' results, "
            "or leave it out",
            param="messages",
        )
    template, effort = dict(fields.chat_template_kwargs), None
    if fields.output_config is not None:
        effort = fields.output_config.effort
    if fields.thinking is not None:
        template.setdefault("enable_thinking", fields.thinking.type != "disabled")
    choice = fields.tool_choice
    return ChatFields(
        messages=messages,
        tools=[
            _tool(one, f"tools[{index}]")
            for index, one in enumerate(sharing_time(fields.tools or ()))
        ]
        or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        chat_template_kwargs=template,
        reasoning_effort=effort,
        cache_salt=fields.cache_salt,
        mm_processor_kwargs=fields.mm_processor_kwargs,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
    )


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return CHOICES[choice.type]


def _tool(tool: dict[str, Any], location: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{location}.type: expected custom or none, as the server runs no tools of its own, got "
            f"{shown(tool['type'])}; describe the tool by name, description and input_schema",
            param="tools",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": function}


def _system_parts(content: Any, location: str) -> list[dict[str, Any]]:
    """The texts of a system prompt, without `BILLING`."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise _unexpected(location, "a text or a list of blocks", content)
    parts = [_text(one, f"{location}[{index}]") for index, one in enumerate(sharing_time(blocks))]
    return [one for one in parts if not one["text"].startswith(BILLING)]


def _translated(message: Message, location: str) -> Iterator[Message]:
    """The messages that stand for one of Anthropic's."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        # In the middle of a conversation. Templates that want the system prompt first get it there.
        if parts := _system_parts(content, f"{location}.content"):
            yield {"role": "developer", "content": parts}
        return
    if role not in ("user", "assistant"):
        raise _unexpected(f"{location}.role", "user, assistant or system", role)
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise _unexpected(f"{location}.content", "a text or a list of blocks", content)
    blocks = [
        (_object(block, f"{location}.content[{index}]"), f"{location}.content[{index}]")
        for index, block in enumerate(sharing_time(content))
    ]
    if role == "assistant":
        yield _assistant(blocks)
    else:
        yield from _of_user(blocks)


def _of_user(blocks: list[tuple[dict[str, Any], str]]) -> Iterator[Message]:
    parts: list[dict[str, Any]] = []
    for block, location in sharing_time(blocks):
        if block.get("type") != "tool_result":
            parts.append(_part(block, location))
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        if not isinstance(name := block.get("tool_use_id"), str):
            raise _unexpected(f"{location}.tool_use_id", "a text", name)
        yield {
            "role": "tool",
            "tool_call_id": name,
            "content": _result(block.get("content"), f"{location}.content"),
        }
    if parts:
        yield {"role": "user", "content": parts}


def _result(content: Any, location: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _unexpected(location, "a text or a list of blocks", content)
    return [
        _part(_object(one, f"{location}[{index}]"), f"{location}[{index}]")
        for index, one in enumerate(sharing_time(content))
    ]


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> Message:
    """One message of a turn. Its texts follow each other without a break, as they were sampled."""
    texts, thoughts, calls = [], [], []
    for block, location in sharing_time(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "tool_use", "id": str(name), "name": str(function), "input": dict(given)}:
                # What a client sends back of a call whose arguments were no object of JSON.
                is_text = given.keys() == {INVALID_JSON} and isinstance(given[INVALID_JSON], str)
                called = {"name": function, "arguments": given[INVALID_JSON] if is_text else given}
                calls.append({"id": name, "type": "function", "function": called})
            case _:
                raise _unknown(
                    location, "text, thinking (thinking) or tool_use (id, name, input)", block
                )
    message: Message = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _part(block: dict[str, Any], location: str) -> dict[str, Any]:
    match block:
        case {"type": "text"}:
            return _text(block, location)
        case {"type": "image", "source": {"type": "base64", "data": str(data), **rest}}:
            kind = rest.get("media_type", "image/jpeg")
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    raise _unknown(
        location, "text, image (a source of type base64) or, not nested, tool_result", block
    )


def _text(block: Any, location: str) -> dict[str, Any]:
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
    raise _unknown(location, "text", _object(block, location))


def _object(block: Any, location: str) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise _unexpected(location, "an object", block)
    return block


def _unknown(location: str, expected: str, block: dict[str, Any]) -> InvalidRequest:
    return InvalidRequest(
        f"{location}: expected a block of type {expected}, got type {shown(block.get('type'))} with "
        f"{', '.join(sorted(map(str, islice(block, 8))))[:200]}; send what it says as one of these",
        param=location.partition("[")[0],
    )


def _unexpected(location: str, expected: str, came: Any) -> InvalidRequest:
    return InvalidRequest(
        f"{location}: expected {expected}, got {shown(came)}",
        param=location.partition("[")[0].partition(".")[0],
    )
