"""Chat messages in the form that chat templates expect, and the images in them.

Follows vLLM's server: content is a list of parts for templates that accept parts, otherwise one
text; arguments of tool calls are objects. `with_calls` changes calls for templates that read them in
another form.
"""

import json
import logging
from typing import Any, NamedTuple

import msgspec

from app.route.fields import Message
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Arguments(dict[str, Any]):
    """The arguments of a call, and the text that the client sent; {}: the text is no object of JSON."""

    sent: str | None = None

    @property
    def text(self) -> str:
        return json.dumps(self, ensure_ascii=False) if self.sent is None else self.sent


class CallForm(NamedTuple):
    """How a template reads messages that call tools."""

    # Else as an object.
    arguments_are_text: bool
    # Whether the message of an assistant that only calls has the content null; else it is empty.
    content_is_null: bool


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


def with_calls(messages: list[Message], form: CallForm) -> list[Message]:
    """The messages of `read_conversation` with the calls in another form."""
    return [
        _with_calls(one, form) if one["role"] == "assistant" and one.get("tool_calls") else one
        for one in messages
    ]


def _with_calls(message: Message, form: CallForm) -> Message:
    changed = dict(message)
    if not any(part["type"] != "text" or part["text"] for part in message.get("content") or ()):
        changed["content"] = None if form.content_is_null else []
    if form.arguments_are_text:
        changed["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
    return changed


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": function["arguments"].text}}


def join_text_parts(messages: list[Message], location: str) -> list[Message]:
    """Messages for a template that accepts text only: parts joined by line feeds, as in vLLM.

    Raises:
        InvalidRequest: a message has an image.
    """
    flat = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            if any(part["type"] == "image" for part in content):
                raise InvalidRequest(
                    f"{location}[{index}]: expected text only, as the model's chat template accepts no "
                    "images, got an image; leave it out",
                    param="messages",
                )
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        flat.append(message)
    return flat


def merge_developer_into_system(messages: list[Message]) -> list[Message]:
    """Messages for a template that does not know the role `developer`.

    All system and developer messages become one system message at the beginning, where templates
    expect it. Without developer messages nothing changes.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    roles = ("developer", "system")
    system = [message for message in messages if message["role"] in roles]
    others = [message for message in messages if message["role"] not in roles]
    if len(system) == 1 and messages[0] is system[0]:
        return [{**system[0], "role": "system"}, *others]
    texts = [_text_of(message.get("content")) for message in system]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


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
    if message["role"] == "assistant":
        _add_assistant_defaults(read)
    elif message["role"] == "tool":
        _join_tool_result(read)
    if message.get("tool_calls"):
        read["tool_calls"] = _read_tool_calls(
            message["tool_calls"], f"{location}.tool_calls", malformed
        )
    return read


def _add_assistant_defaults(message: Message) -> None:
    """Adds what templates rely on: content in every message, reasoning under both field names."""
    if message.get("content") is None:
        message["content"] = []
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    names = ("reasoning", "reasoning_content")
    reasoning = next((message[one] for one in names if message.get(one) is not None), None)
    if reasoning is not None:
        message |= dict.fromkeys(names, reasoning)


def _join_tool_result(message: Message) -> None:
    """Joins a tool's result into one text: templates that accept parts do not accept them here."""
    parts = message.get("content")
    if isinstance(parts, list) and all(part["type"] == "text" for part in parts):
        message["content"] = "\n".join(part["text"] for part in parts)


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
        f"with the value under the name of the type, got type {part.get('type')!r} with "
        f"{', '.join(sorted(map(str, part)))}",
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
        sent = function.get("arguments")
        found = _arguments_of(sent or "{}") if isinstance(sent, str) else sent
        if isinstance(sent, str) and not isinstance(found, dict):
            # The model wrote invalid JSON. The conversation must be able to continue.
            malformed.append(f"{location}[{index}]")
        arguments = Arguments(found if isinstance(found, dict) else {})
        arguments.sent = sent if isinstance(sent, str) else None
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _arguments_of(text: str) -> Any:
    """What JSON text of a model means; None if it is no JSON.

    Models write NaN, numbers that no float holds and halves of surrogate pairs, and Python's decoder,
    which vLLM uses, reads them. A half cannot be tokenized, and stays the escape that it was.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        pass
    try:
        return _without_surrogates(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(one) for one in value]
    return value


def _wrong(location: str, expected: str, got: Any) -> InvalidRequest:
    try:
        text = repr(got)
    except RecursionError:
        text = type(got).__name__
    shown = text if len(text) <= 60 else text[:60] + "…"
    return InvalidRequest(f"{location}: expected {expected}, got {shown}", param="messages")
