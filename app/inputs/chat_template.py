"""Messages through the model's chat template, in the tokenizer's thread."""

import re
from typing import Any, NamedTuple

from app.inputs.chat_messages import join_text_parts, merge_developer_into_system
from app.schemas.generation import Message
from titopool.errors import InvalidRequest, TitopoolError

# Arguments of transformers' apply_chat_template that are the server's to set. The template is
# the model's: one that a client sends would run in this process.
RESERVED = frozenset(
    ("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
     "tokenizer_kwargs", "add_generation_prompt", "continue_final_message")
)  # fmt: skip
_PROBE = "titopool"
_KNOWS_DEVELOPER = re.compile("""["']developer["']""")
_PRINTED = re.compile(r"""['"]text['"]\s*:\s*['"]""" + _PROBE)


class Chat(NamedTuple):
    """One conversation to render."""

    # As `app.inputs.chat_messages.read_conversation` makes them.
    messages: list[Message]
    # Where they stand in the body.
    place: str
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Refuses arguments that are not the client's to set."""
    if taken := sorted(RESERVED & kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs: expected variables of the model's template, got {taken[0]}, "
            "which the server sets itself; leave it out",
            param="chat_template_kwargs",
        )


def render_all(tokenizer: Any, chats: list[Chat]) -> list[list[int]]:
    """The token ids of each conversation; special tokens are those that the template writes.

    Raises:
        InvalidRequest: the model has no template, or it refuses a conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(
            "messages: expected a model with a chat template, this one has none; send prompts",
            param="messages",
        )
    reads_parts = _accepts_parts(tokenizer)
    texts = [_render(tokenizer, chat, reads_parts) for chat in chats]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def _render(tokenizer: Any, chat: Chat, reads_parts: bool) -> str:
    messages = chat.messages if reads_parts else join_text_parts(chat.messages, chat.place)
    if not _KNOWS_DEVELOPER.search(str(tokenizer.chat_template)):
        messages = merge_developer_into_system(messages)
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=chat.tools or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **chat.template_kwargs,
        )
    except TitopoolError:
        raise
    except Exception as error:
        # Whatever the template raises, or stumbles over in these messages.
        raise InvalidRequest(
            f"{chat.place}: the model's chat template refused them: {type(error).__name__}: "
            f"{error}"[:500],
            param="messages",
        ) from error
    return text


def _accepts_parts(tokenizer: Any) -> bool:
    """Whether the template takes a list of parts for content, or only text."""
    known = getattr(tokenizer, "titopool_reads_parts", None)
    if known is None:
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = tokenizer.apply_chat_template([message], tokenize=False)
            # One that writes the list itself shows its keys.
            known = _PROBE in text and not _PRINTED.search(text)
        except Exception:
            known = False
        tokenizer.titopool_reads_parts = known
    return bool(known)
