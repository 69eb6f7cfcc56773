"""Messages as a chat template takes them, and the images in them.

Follows what vLLM's server does before it renders: content as parts for templates that read
parts, else as one text; arguments of tool calls as objects.
"""

import logging
from typing import Any, NamedTuple

import msgspec

from app.schemas.generation import Message
from titopool.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Conversation(NamedTuple):
    """Messages with parts for all content, and their images in base64."""

    messages: list[Message]
    images: list[str]


def read_conversation(
    messages: list[Message], place: str, *, is_rendered: bool = True
) -> Conversation:
    """`messages` with uniform content; `place` is where they stand in the body.

    Args:
        is_rendered: False looks at the images only.

    Raises:
        InvalidRequest: a message has no role, or a part is none that is known.
    """
    if not messages and is_rendered:
        raise InvalidRequest(f"{place}: expected at least one message, got an empty list",
                             param="messages")  # fmt: skip
    images: list[str] = []
    if not is_rendered:
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and str(part.get("type")).startswith("image"):
                    _read_part(part, place, images)
        return Conversation(messages, images)
    read = [
        _read_message(message, f"{place}[{index}]", images)
        for index, message in enumerate(messages)
    ]
    return Conversation(read, images)


def join_text_parts(messages: list[Message], place: str) -> list[Message]:
    """The same for a template that reads text only: parts joined by line feeds, as vLLM does."""
    flat = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            if any(part["type"] == "image" for part in content):
                raise InvalidRequest(
                    f"{place}[{index}]: expected text only, as the model's chat template takes no "
                    "images, got one",
                    param="messages",
                )
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        flat.append(message)
    return flat


def merge_developer_into_system(messages: list[Message]) -> list[Message]:
    """The same for a template without a developer's role: his messages are the system's.

    All of those make up one at the beginning, where templates want it.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    is_of_system = [message["role"] in ("developer", "system") for message in messages]
    first = [message for message, it_is in zip(messages, is_of_system, strict=True) if it_is]
    others = [message for message, it_is in zip(messages, is_of_system, strict=True) if not it_is]
    if len(first) == 1 and is_of_system[0]:
        return [{**first[0], "role": "system"}, *others]
    texts = [_text_of(message.get("content")) for message in first]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def _read_message(message: Message, place: str, images: list[str]) -> Message:
    if not isinstance(message.get("role"), str):
        raise _wrong(f"{place}.role", "a text", message.get("role"))
    read = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        read["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        read["content"] = [
            _read_part(part, f"{place}.content[{index}]", images)
            for index, part in enumerate(content)
        ]
    elif content is not None:
        raise _wrong(f"{place}.content", "a text or a list of parts", content)
    if message["role"] == "assistant":
        _complete_assistant(read)
    elif message["role"] == "tool":
        _flatten_tool_answer(read)
    if message.get("tool_calls"):
        read["tool_calls"] = _read_tool_calls(message["tool_calls"], f"{place}.tool_calls")
    return read


def _complete_assistant(message: Message) -> None:
    """What templates take for granted: content beside calls, reasoning under both of its names."""
    if message.get("content") is None:
        message["content"] = []
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    names = ("reasoning", "reasoning_content")
    reasoning = next((message[one] for one in names if message.get(one) is not None), None)
    if reasoning is not None:
        message |= dict.fromkeys(names, reasoning)


def _flatten_tool_answer(message: Message) -> None:
    """One text: even templates that read parts read none of a tool's."""
    parts = message.get("content")
    if isinstance(parts, list) and all(part["type"] == "text" for part in parts):
        message["content"] = "\n".join(part["text"] for part in parts)


def _read_part(part: Any, place: str, images: list[str]) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _wrong(place, "an object", part)
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case (
            {"type": "image_pil", "image_pil": str(image)}
            | {"type": "image_url", "image_url": str(image) | {"url": str(image)}}
            | {"type": "image", "image": str(image)}
        ):
            images.append(image)
            return {"type": "image"}
    raise InvalidRequest(
        f"{place}: expected a part of type text, image_url (a data: URL), image_pil or image (base64), "
        f"with its value under the name of its type, got type {part.get('type')!r} with "
        f"{', '.join(sorted(map(str, part)))}",
        param="messages",
    )


def _read_tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Templates expect `arguments` as an object; OpenAI's clients send them as JSON."""
    if not isinstance(calls, list):
        raise _wrong(place, "a list", calls)
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _wrong(f"{place}[{index}].function", "an object", function)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments or "{}")
            except (msgspec.DecodeError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                # A slip of the model: refused here, the conversation could never go on.
                logger.warning(
                    "%s[%d]: arguments that are no object are rendered as {}", place, index
                )
        is_object = isinstance(arguments, dict)
        read.append({**call, "function": {**function, "arguments": arguments if is_object else {}}})
    return read


def _wrong(place: str, expected: str, got: Any) -> InvalidRequest:
    try:
        text = repr(got)
    except RecursionError:
        text = type(got).__name__
    shown = text if len(text) <= 60 else text[:60] + "…"
    return InvalidRequest(f"{place}: expected {expected}, got {shown}", param="messages")
