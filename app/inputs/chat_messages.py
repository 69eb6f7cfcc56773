"""Chat messages in the form that chat templates expect, and the images in them.

Follows vLLM's server: content is a list of parts for templates that accept parts, otherwise one
text; arguments of tool calls are objects. `ChatTemplate` changes what a template reads otherwise.
"""

import logging
from typing import Any, NamedTuple

from app.route.decoding import beginning
from app.route.fields import Message
from app.time_slices import sharing_time
from titopool.conversations.chat_template import call_with_arguments, complete
from titopool.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Conversation(NamedTuple):
    """Messages whose content is lists of parts, and the images in base64, in order."""

    messages: list[Message]
    images: list[str]


def read_conversation(
    messages: list[Message], location: str, *, is_rendered: bool = True
) -> Conversation:
    """Messages with uniform content.

    Args:
        location: location of `messages` in the client's body.
        is_rendered: False reads the images only and leaves the messages as they are.

    Raises:
        InvalidRequest: a message has no role, or a part has an unknown type.
    """
    if not messages and is_rendered:
        raise InvalidRequest(f"{location}: expected at least one message, got an empty list",
                             param="messages")  # fmt: skip
    images: list[str] = []
    if not is_rendered:
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and str(part.get("type")).startswith("image"):
                    _read_part(part, location, images)
        return Conversation(messages, images)
    # Locations of tool calls whose arguments are malformed.
    malformed: list[str] = []
    read = [
        _read_message(message, f"{location}[{index}]", images, malformed)
        for index, message in enumerate(sharing_time(messages))
    ]
    if malformed:
        # One line: a body may have a million of them.
        logger.warning(
            "arguments of %d tool calls are no JSON objects; rendered as {}; the first is %s",
            len(malformed), malformed[0],
        )  # fmt: skip
    return Conversation(read, images)


def _read_message(
    message: Message, location: str, images: list[str], malformed: list[str]
) -> Message:
    if not isinstance(message.get("role"), str):
        raise _wrong(f"{location}.role", "a string", message.get("role"))
    read = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        read["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        read["content"] = [
            _read_part(part, f"{location}.content[{index}]", images)
            for index, part in enumerate(sharing_time(content))
        ]
    elif content is not None:
        raise _wrong(f"{location}.content", "a string or a list of parts", content)
    complete(read)
    if message.get("tool_calls"):
        read["tool_calls"] = _read_tool_calls(
            message["tool_calls"], f"{location}.tool_calls", malformed
        )
    return read


def _read_part(part: Any, location: str, images: list[str]) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _wrong(location, "an object", part)
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
        f"{location}: expected a part of type text, image_url (a data: URL), image_pil or image (base64), "
        f"with the value under the name of the type, got type {beginning(part.get('type'), 60)} with "
        f"{', '.join(name[:60] for name in sorted(map(str, part))[:20])}",
        param="messages",
    )


def _read_tool_calls(calls: Any, location: str, malformed: list[str]) -> list[dict[str, Any]]:
    """Tool calls with `arguments` as an object, which templates expect; clients send JSON text.

    Args:
        malformed: gets the location of each call whose arguments are no object.
    """
    if not isinstance(calls, list):
        raise _wrong(location, "a list", calls)
    read = []
    for index, call in enumerate(sharing_time(calls)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _wrong(f"{location}[{index}].function", "an object", function)
        with_arguments, is_object = call_with_arguments(call)
        read.append(with_arguments)
        if not is_object:
            # The model wrote invalid JSON. The conversation must be able to continue.
            malformed.append(f"{location}[{index}]")
    return read


def _wrong(location: str, expected: str, got: Any) -> InvalidRequest:
    text = beginning(got, 61)
    shown = text if len(text) <= 60 else text[:60] + "…"
    return InvalidRequest(f"{location}: expected {expected}, got {shown}", param="messages")
