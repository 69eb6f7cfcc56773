"""How a chat template reads messages: content as text or parts, calls, the developer's role."""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from titopool.errors import InvalidRequest

# With a content that is a text or a list of parts, and calls as `call_with_arguments` gives them.
Message = dict[str, Any]

_PROBE = "titopool"
_PROBE_IN_REPR = re.compile(r"""['"]text['"]\s*:\s*['"]""" + _PROBE)
_KNOWS_DEVELOPER = re.compile("""["']developer["']""")
# Arguments in Python's form, or as JSON within JSON.
_BAD_ARGUMENTS = re.compile(r"""'titopool_key'|\\"titopool_key""")


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


# In the order of preference. The first one is what vLLM's server does.
_FORMS = [
    CallForm(arguments_are_text=False, content_is_null=False),
    CallForm(arguments_are_text=False, content_is_null=True),
    CallForm(arguments_are_text=True, content_is_null=True),
    CallForm(arguments_are_text=True, content_is_null=False),
]


class ChatTemplate:
    """The chat template of a transformers tokenizer. What it accepts is tried once.

    Its errors are arbitrary: templates raise them on purpose, or over unexpected messages.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})

    def text(
        self,
        messages: list[Message],
        location: str = "messages",
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """What the template writes.

        Args:
            location: of the messages in the client's body.

        Raises:
            InvalidRequest: a message has an image, and the template accepts text only.
        """
        if any(message.get("tool_calls") for message in messages):
            messages = with_calls(messages, self._call_form)
        if not self.accepts_parts or not self.accepts_images:
            check_no_images(messages, location)
        if not self.accepts_parts:
            messages = join_text_parts(messages)
        if not _KNOWS_DEVELOPER.search(str(self._tokenizer.chat_template)):
            messages = merge_developer_into_system(messages)
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **self._kwargs,
            **(template_kwargs or {}),
        )
        return text

    @cached_property
    def accepts_parts(self) -> bool:
        """Whether the template accepts a list of parts as content, not only text."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._tokenizer.apply_chat_template([message], tokenize=False, **self._kwargs)
        except Exception:
            return False
        # A template that prints the list itself shows its keys.
        return _PROBE in text and not _PROBE_IN_REPR.search(text)

    @cached_property
    def accepts_images(self) -> bool:
        """Whether an image changes what the template writes: some leave out all parts but texts."""
        text = {"type": "text", "text": _PROBE}
        try:
            alone, both = (
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], tokenize=False, **self._kwargs
                )
                for content in ([text], [{"type": "image"}, text])
            )
        except Exception:
            return True
        return bool(alone != both)

    @cached_property
    def _call_form(self) -> CallForm:
        """The first form in which the template writes a call with its arguments."""
        return next((form for form in _FORMS if self._shows_calls(form)), _FORMS[0])

    def _shows_calls(self, form: CallForm) -> bool:
        messages = with_calls(_conversation_with_call(), form)
        if not self.accepts_parts:
            messages = join_text_parts(messages)
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._kwargs)
        except Exception:
            return False
        has_call = "titopool_tool" in text and "titopool_key" in text
        return has_call and not _BAD_ARGUMENTS.search(text)


def _conversation_with_call() -> list[Message]:
    """Mistral's ids of calls have nine letters and digits."""
    function = {"name": "titopool_tool", "arguments": '{"titopool_key": 7}'}
    call, _ = call_with_arguments({"id": "titopool1", "type": "function", "function": function})
    result = {"role": "tool", "tool_call_id": "titopool1", "name": "titopool_tool", "content": "1"}
    return [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [], "tool_calls": [call]},
        result,
    ]


def call_with_arguments(call: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """A call with `Arguments`, of which clients send JSON text; and whether that is an object."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        # The form of another API, which a template may know.
        return dict(call), True
    sent = function.get("arguments")
    found = _read_arguments(sent or "{}") if isinstance(sent, str) else sent
    arguments = Arguments(found if isinstance(found, dict) else {})
    arguments.sent = sent if isinstance(sent, str) else getattr(sent, "sent", None)
    is_object = isinstance(found, dict) or not isinstance(sent, str)
    return {**call, "function": {**function, "arguments": arguments}}, is_object


def with_calls(messages: list[Message], form: CallForm) -> list[Message]:
    """The messages with their calls in another form."""
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
    if "function" not in call:
        return call
    function = call["function"]
    return {**call, "function": {**function, "arguments": function["arguments"].text}}


def check_no_images(messages: list[Message], location: str) -> None:
    """Raises InvalidRequest for a message with an image."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(part["type"] == "image" for part in content):
            raise InvalidRequest(
                f"{location}[{index}]: expected text only, as the model's chat template accepts no "
                "images, got an image; leave it out",
                param="messages",
            )


def join_text_parts(messages: list[Message]) -> list[Message]:
    """Messages for a template that accepts text only: parts joined by line feeds, as in vLLM."""
    return [
        {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


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
    texts = [text_of(message.get("content")) for message in system]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def text_of(content: Any) -> str:
    """The texts of a message's content."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def complete(message: Message) -> None:
    """Gives a message what templates rely on: an assistant's has a content, and its reasoning stands under
    both names; a tool's is one text, as templates that accept parts do not accept them there."""
    if message["role"] == "assistant":
        if message.get("content") is None:
            message["content"] = []
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        names = ("reasoning", "reasoning_content")
        reasoning = next((message[one] for one in names if message.get(one) is not None), None)
        if reasoning is not None:
            message |= dict.fromkeys(names, reasoning)
    elif message["role"] == "tool":
        parts = message.get("content")
        if isinstance(parts, list) and all(part.get("type") == "text" for part in parts):
            message["content"] = "\n".join(part["text"] for part in parts)


def _read_arguments(text: str) -> Any:
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
