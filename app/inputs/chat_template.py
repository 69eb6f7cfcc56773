"""Renders messages with the model's chat template, in the tokenizer's thread."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from app.inputs.tokenizer import encode_all
from app.inputs.turns import within
from app.route.decoding import convert
from app.route.fields import Message
from titopool.conversations.chat_template import ChatTemplate
from titopool.errors import ConfigError, InvalidRequest, TitopoolError

# Arguments of transformers' `apply_chat_template` that only the server sets. `Chat` takes out a template,
# which is code that must not run in this process.
RESERVED = frozenset(
    ("conversation", "messages", "tools", "documents", "tokenize", "padding", "truncation",
     "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
     "tokenizer_kwargs", "add_generation_prompt", "continue_final_message")
)  # fmt: skip
# CPU time of the template for one conversation.
MAX_RENDER_S = 5.0
_GENERATION_TAG = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


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
    # The request's own; None: the model's. `app.inputs.request_templates` renders with it.
    chat_template: str | None = None
    # What the request's own template has written.
    text: str | None = None

    def __post_init__(self) -> None:
        if "chat_template" in self.template_kwargs:
            # As in vLLM, where a field of the body wins.
            kwargs = dict(self.template_kwargs)
            own = kwargs.pop("chat_template")
            if own is not None:
                own = convert(own, str, "chat_template_kwargs.chat_template")
            object.__setattr__(self, "template_kwargs", kwargs)
            object.__setattr__(self, "chat_template", self.chat_template or own)
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
    if chat.text is not None:
        return len(chat.text)
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
    if not getattr(tokenizer, "chat_template", None) and any(one.text is None for one in chats):
        raise InvalidRequest(
            "messages: expected a model with a chat template, got a model without one; send prompts",
            param="messages",
        )
    texts = [_render(tokenizer, chat) if chat.text is None else chat.text for chat in chats]
    locations = [chat.location for chat in chats]
    return encode_all(tokenizer, texts, locations, max_model_len, False, is_truncated)


def text_by(tokenizer: Any, chat: Chat) -> str:
    """What the tokenizer's template writes for a conversation, in whatever time."""
    template: ChatTemplate | None = getattr(tokenizer, "titopool_chat_template", None)
    if template is None:
        template = tokenizer.titopool_chat_template = ChatTemplate(tokenizer)
    return template.text(
        chat.messages,
        chat.location,
        tools=chat.tools,
        template_kwargs=chat.template_kwargs,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


def _render(tokenizer: Any, chat: Chat) -> str:
    try:
        return within(MAX_RENDER_S, partial(text_by, tokenizer, chat))
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
