"""Renders messages with the model's chat template, in the tokenizer's thread."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from app.inputs.chat_messages import (
    CallForm,
    join_text_parts,
    merge_developer_into_system,
    read_conversation,
    with_calls,
)
from app.inputs.tokenizer import encode_all
from app.inputs.turns import within
from app.route.fields import Message
from titopool.errors import ConfigError, InvalidRequest, TitopoolError

# Arguments of transformers' `apply_chat_template` that only the server sets. A client's template is
# refused because templates are code that would run in this process.
RESERVED = frozenset(
    ("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
     "tokenizer_kwargs", "add_generation_prompt", "continue_final_message")
)  # fmt: skip
# CPU time of the template for one conversation.
MAX_RENDER_S = 5.0
_PROBE = "titopool"
_GENERATION_TAG = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
_KNOWS_DEVELOPER = re.compile("""["']developer["']""")
_PROBE_IN_REPR = re.compile(r"""['"]text['"]\s*:\s*['"]""" + _PROBE)
# A conversation in which a tool was called. Mistral's ids of calls have nine letters and digits.
_CALL_ID = "titopool1"
_FUNCTION = {"name": "titopool_tool", "arguments": '{"titopool_key": 7}'}
_CALLING = {
    "role": "assistant", "content": None,
    "tool_calls": [{"id": _CALL_ID, "type": "function", "function": _FUNCTION}],
}  # fmt: skip
_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "name": "titopool_tool", "content": "1"}
_CONVERSATION: list[Message] = [{"role": "user", "content": "a"}, _CALLING, _RESULT]
# Arguments in Python's form, or as JSON within JSON.
_BAD_ARGUMENTS = re.compile(r"""'titopool_key'|\\"titopool_key""")
# In the order of preference. The first one is what vLLM's server does.
_FORMS = [
    CallForm(arguments_are_text=False, content_is_null=False),
    CallForm(arguments_are_text=False, content_is_null=True),
    CallForm(arguments_are_text=True, content_is_null=True),
    CallForm(arguments_are_text=True, content_is_null=False),
]


@cache
def template_of_file(path: str) -> str | None:
    """The chat template in a file; None: no path.

    The master reads it once, so front ends that are forked later have the same one.

    Raises:
        ConfigError: the file cannot be read, or is no template.
    """
    if not path:
        return None
    try:
        text = Path(path).read_text("utf-8")
        # Jinja does not know transformers' tag, which marks what a model has written.
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", text))
    except (OSError, ValueError, TemplateSyntaxError) as error:
        raise ConfigError(
            f"chat_template: expected a file with a Jinja template, got {path}: {error}"
        ) from None
    if not text.strip():
        raise ConfigError(f"chat_template: expected a template in {path}, got an empty file")
    return text


@dataclass(frozen=True)
class Chat:
    """A conversation to render.

    Raises:
        InvalidRequest: `template_kwargs` has an argument that only the server sets, or
            `continue_final_message` comes with `add_generation_prompt`.
    """

    # From `app.inputs.chat_messages.read_conversation`.
    messages: list[Message]
    # Location of the messages in the client's body.
    location: str
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        if reserved := sorted(RESERVED & self.template_kwargs.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs: expected variables of the model's template, got "
                f"{reserved[0]}, which only the server sets; leave it out",
                param="chat_template_kwargs",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "continue_final_message: expected false while add_generation_prompt is true, got "
                "true; set add_generation_prompt to false",
                param="continue_final_message",
            )


def length_of(chat: Chat) -> int:
    """Characters of a conversation's texts."""
    contents = [message.get("content") for message in chat.messages]
    return len(contents) + sum(
        len(content)
        if isinstance(content, str)
        else sum(len(part.get("text", "")) for part in content or ())
        for content in contents
    )


def render_all(
    tokenizer: Any, chats: Sequence[Chat], max_model_len: int, is_truncated: bool = False
) -> list[list[int]]:
    """The token ids of each conversation, with the special tokens that the template writes.

    Args:
        is_truncated: as in `encode_all`.

    Raises:
        PromptTooLong: as `encode_all`.
        InvalidRequest: the model has no chat template, or the template refuses a conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(
            "messages: expected a model with a chat template, got a model without one; send prompts",
            param="messages",
        )
    reads_parts = _accepts_parts(tokenizer)
    texts = [_render(tokenizer, chat, reads_parts) for chat in chats]
    locations = [chat.location for chat in chats]
    return encode_all(tokenizer, texts, locations, max_model_len, False, is_truncated)


def _render(tokenizer: Any, chat: Chat, reads_parts: bool) -> str:
    try:
        text = within(MAX_RENDER_S, partial(_text_of, tokenizer, chat, reads_parts))
    except TitopoolError:
        raise
    except TimeoutError as error:
        raise InvalidRequest(
            f"{chat.location}: expected messages, tools and chat_template_kwargs that the model's chat "
            f"template renders within {MAX_RENDER_S:g} s of CPU time, got some that take longer; send "
            "fewer or shorter ones",
            param="messages",
        ) from error
    except Exception as error:
        # Templates raise arbitrary errors, on purpose or over unexpected messages.
        raise InvalidRequest(
            f"{chat.location}: the model's chat template refused the messages: {type(error).__name__}: "
            f"{error}"[:500],
            param="messages",
        ) from error
    return text


def _text_of(tokenizer: Any, chat: Chat, reads_parts: bool) -> str:
    """What the template writes for a conversation."""
    messages = chat.messages
    if any(message.get("tool_calls") for message in messages):
        messages = with_calls(messages, _call_form(tokenizer, reads_parts))
    if not reads_parts:
        messages = join_text_parts(messages, chat.location)
    if not _KNOWS_DEVELOPER.search(str(tokenizer.chat_template)):
        messages = merge_developer_into_system(messages)
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=chat.tools or None,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tokenize=False,
        **chat.template_kwargs,
    )
    return text


def _accepts_parts(tokenizer: Any) -> bool:
    """Whether the template accepts a list of parts as content, not only text."""
    known = getattr(tokenizer, "titopool_reads_parts", None)
    if known is None:
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = within(
                MAX_RENDER_S, lambda: tokenizer.apply_chat_template([message], tokenize=False)
            )
            # A template that prints the list itself shows its keys.
            known = _PROBE in text and not _PROBE_IN_REPR.search(text)
        except Exception:
            known = False
        tokenizer.titopool_reads_parts = known
    return bool(known)


def _call_form(tokenizer: Any, reads_parts: bool) -> CallForm:
    """The first form in which the template writes a call with its arguments."""
    known = getattr(tokenizer, "titopool_call_form", None)
    if known is None:
        shown = (form for form in _FORMS if _shows_calls(tokenizer, form, reads_parts))
        known = tokenizer.titopool_call_form = next(shown, _FORMS[0])
    form: CallForm = known
    return form


def _shows_calls(tokenizer: Any, form: CallForm, reads_parts: bool) -> bool:
    messages = with_calls(read_conversation(_CONVERSATION, "messages").messages, form)
    if not reads_parts:
        messages = join_text_parts(messages, "messages")
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:
        # Templates raise arbitrary errors.
        return False
    has_call = "titopool_tool" in text and "titopool_key" in text
    return has_call and not _BAD_ARGUMENTS.search(text)
