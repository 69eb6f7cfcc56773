"""Items and tools of the Responses API as a chat: what a model wrote in one turn is one message.

As in vLLM's server, reasoning, text and calls that follow each other become one assistant message,
because a chat template renders a turn at once. Fields that templates do not read (`id`, `status`,
`annotations`, …) are not checked.
"""

from typing import Any

from app.responses.bodies import TOOL_FIELDS, ResponsesFields
from app.route.decoding import shown
from app.route.fields import ChatFields, Message
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "refusal")
Item = dict[str, Any]


def translate(fields: ResponsesFields) -> ChatFields:
    """The chat that a body stands for.

    Raises:
        InvalidRequest: an item, a part, a tool or the choice is malformed or not served.
    """
    tools = [_tool(one, f"tools[{index}]") for index, one in enumerate(sharing_time(fields.tools))]
    choice = _tool_choice(fields.tool_choice)
    return ChatFields(
        messages=_messages(fields),
        tools=tools,
        # Clients send "auto" without tools, too.
        tool_choice=choice if tools or choice != "auto" else None,
        parallel_tool_calls=fields.parallel_tool_calls,
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning.effort,
        cache_salt=fields.cache_salt,
        mm_processor_kwargs=fields.mm_processor_kwargs,
    )


def _messages(fields: ResponsesFields) -> list[Message]:
    messages: list[Message] = []
    if fields.instructions is not None:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    # The assistant's message that the items before have made; {}: they are of others.
    turn: Message = {}
    for index, item in enumerate(sharing_time(fields.input)):
        found = _read(item, f"input[{index}]")
        if found["role"] != "assistant":
            messages.append(found)
            turn = {}
        elif not turn or "reasoning" in found or "content" in found.keys() & turn.keys():
            # Encrypted reasoning has nothing to render.
            messages += [turn := found] if len(found) > 1 else []
        elif "tool_calls" in found.keys() & turn.keys():
            turn["tool_calls"] += found["tool_calls"]
        else:
            turn |= found
    return messages


def _read(item: Item, location: str) -> Message:
    """The message that an item stands for, or its part of one of the assistant's."""
    kind = _kind_of(item) or ("message" if "role" in item else "")
    if kind == "message":
        return _message(item, location)
    if kind == "function_call":
        function = {one: _text_of(item, one, location) for one in ("name", "arguments")}
        call = {"id": _text_of(item, "call_id", location), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(item, "output", location, (*TEXTS, "input_image"))
        call_id = _text_of(item, "call_id", location)
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    if kind == "reasoning":
        for name in ("content", "summary"):
            parts = _content(item, name, location, ("reasoning_text", "summary_text"))
            if parts:
                return {"role": "assistant", "reasoning": _joined(parts, "\n")}
        return {"role": "assistant"}
    expected = "an item of type message, function_call, function_call_output or reasoning"
    remedy = "leave it out"
    if kind == "item_reference":
        remedy = "no item is kept here, so send the item itself"
    raise _wrong(location, expected, f"type {kind!r}", remedy)


def _message(item: Item, location: str) -> Message:
    role = item.get("role")
    if role not in ROLES:
        raise _wrong(f"{location}.role", f"one of {', '.join(ROLES)}", shown(role))
    if role == "assistant":
        # A model's text in several parts is one text.
        return {"role": role, "content": _joined(_content(item, "content", location, TEXTS), "")}
    return {"role": role, "content": _content(item, "content", location, (*TEXTS, "input_image"))}


def _content(item: Item, name: str, location: str, kinds: tuple[str, ...]) -> str | list[Item]:
    """A text, or parts as chats have them; `kinds`: the types that parts may have."""
    content, location = item.get(name), f"{location}.{name}"
    if content is None and item.get("type") == "reasoning":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(location, "a text or a list of parts", type(content).__name__)
    return [
        _part(one, f"{location}[{index}]", kinds) for index, one in enumerate(sharing_time(content))
    ]


def _joined(content: str | list[Item], between: str) -> str:
    if isinstance(content, str):
        return content
    return between.join(part["text"] for part in content)


def _part(part: Any, location: str, kinds: tuple[str, ...]) -> Item:
    kind = _kind_of(part)
    if kind not in kinds:
        expected = f"a part of type {', '.join(kinds)}"
        raise _wrong(location, expected, f"type {kind!r}", "leave it out, or write it as a text")
    if kind != "input_image":
        text = _text_of(part, "refusal" if kind == "refusal" else "text", location)
        return {"type": "text", "text": text}
    remedy = "send the image in base64, as a data: URL in image_url"
    if part.get("file_id") is not None:
        raise _wrong(f"{location}.file_id", "none, as no files are kept", "one", remedy)
    url = _text_of(part, "image_url", location)
    if not url.startswith("data:"):
        expected = "a data: URL, as the server fetches nothing"
        raise _wrong(f"{location}.image_url", expected, repr(url[:60]), remedy)
    return {"type": "image_url", "image_url": url}


def _tool(tool: dict[str, Any], location: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise InvalidRequest(
            f"{location}: expected a tool of type function, as the server runs no tools, got type "
            f"{shown(kind)}; leave it out, or describe it as a function that the client runs",
            param="tools",
        )
    return {"type": kind, "function": {name: tool[name] for name in TOOL_FIELDS if name in tool}}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    match choice:
        case "auto" | "none" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise InvalidRequest(
        'tool_choice: expected auto, none, required or {"type": "function", "name": …}, got '
        f"{shown(choice)}; to allow some tools only, leave the others out of tools",
        param="tool_choice",
    )


def _kind_of(value: Any) -> str:
    """The type of an item or part; "" for none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def _text_of(value: Item, name: str, location: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise _wrong(f"{location}.{name}", "a text", type(text).__name__)
    return text


def _wrong(location: str, expected: str, got: str, remedy: str = "send one") -> InvalidRequest:
    return InvalidRequest(
        f"{location}: expected {expected}, got {got[:100]}; {remedy}", param="input"
    )
