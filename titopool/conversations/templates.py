"""A model's chat template with its tokenizer, here or on the server."""

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from titopool.conversations.chat_template import ChatTemplate, call_with_arguments, complete
from titopool.conversations.interface import Ids, Message
from titopool.conversations.messages import with_images

if TYPE_CHECKING:
    from titopool.client.sync_client import Client


class LocalTemplate:
    """A transformers tokenizer's template; it renders what the server's render route does."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.tools = [_tool_in_order(tool) for tool in tools or ()] or None
        self.template_kwargs = dict(template_kwargs or {})
        # Templates that write today's date would rewrite the conversations at midnight.
        now = {"strftime_now": datetime.datetime.now().strftime}
        self._template = ChatTemplate(tokenizer, {**now, **self.template_kwargs})

    def render(
        self, messages: Sequence[Message], images: Sequence[str], *, is_prompt: bool = True
    ) -> Ids:
        """The ids of the messages, with a generation prompt at the end if `is_prompt`.

        Args:
            images: in base64, those of the messages' image parts.
        """
        return self.encode(self.text(messages, images, is_prompt=is_prompt))

    def text(
        self, messages: Sequence[Message], images: Sequence[str], *, is_prompt: bool = True
    ) -> str:
        """As `render`, before it is tokenized."""
        return self._template.text(
            [_read(message) for message in messages],
            tools=self.tools,
            add_generation_prompt=is_prompt,
        )

    def encode(self, text: str) -> Ids:
        """The ids of a text, without special tokens that it does not have."""
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, ids: Ids) -> str:
        """The text of ids, with special tokens."""
        text: str = self.tokenizer.decode(ids.tolist())
        return text


class Rendered(str):
    """A text of ids that the server has rendered. To tokenize it may give others: some tokenizers write
    a blank before a word or read one."""

    ids: Ids


class ServerTemplate:
    """The template of the server's model, with the methods of `LocalTemplate`."""

    def __init__(
        self,
        client: "Client",
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self._client = client
        self._tools = list(tools or ()) or None
        self._kwargs = dict(template_kwargs or {}) or None

    def render(
        self, messages: Sequence[Message], images: Sequence[str], *, is_prompt: bool = True
    ) -> Ids:
        ids = self._client.render(
            with_images(messages, images),
            tools=self._tools,
            chat_template_kwargs=self._kwargs,
            add_generation_prompt=is_prompt,
        )
        return np.asarray(ids, np.int32)

    def text(
        self, messages: Sequence[Message], images: Sequence[str], *, is_prompt: bool = True
    ) -> Rendered:
        """As `LocalTemplate.text`, with its ids."""
        ids = self.render(messages, images, is_prompt=is_prompt)
        text = Rendered(self.decode(ids))
        text.ids = ids
        return text

    def encode(self, text: str) -> Ids:
        return np.asarray(self._client.tokenize(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Ids) -> str:
        return self._client.detokenize(ids.tolist()) if len(ids) else ""


Template: TypeAlias = LocalTemplate | ServerTemplate


def make_template(
    client: "Client",
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> Template:
    """The template of `tokenizer`, or of the server's model where that is None."""
    if tokenizer is None:
        return ServerTemplate(client, tools, template_kwargs)
    return LocalTemplate(tokenizer, tools, template_kwargs)


def _read(message: Message) -> dict[str, Any]:
    """A message as the server reads it."""
    read = dict(message)
    if isinstance(content := message.get("content"), str):
        read["content"] = [{"type": "text", "text": content}]
    complete(read)
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [call_with_arguments(call)[0] for call in calls]
    return read


def _tool_in_order(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with its keys as the server gives them to the template, which may print them."""
    function = tool["function"]
    names = ("name", "description", "parameters")
    ordered = {name: function.get(name) for name in names}
    if (strict := function.get("strict")) is not None:
        ordered["strict"] = strict
    return {"type": "function", "function": ordered}
