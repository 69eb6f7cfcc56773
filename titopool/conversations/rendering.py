"""Renders messages to ids by the model's chat template, here or by the server's render route."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from titopool.errors import InvalidRequest, PromptTooLong, TitopoolError
from titopool.conversations.interface import ContextFull, GenerationClient, Ids, Message
from titopool.conversations.messages import with_images

# Ends a sampled turn's text. No text has this word, and no tokenizer merges it with the space before
# it or with what a template writes after a turn.
SENTINEL = " titopoolsentinel"
# Ends in another token than the sentinel.
OTHER_SENTINEL = " titopool7"
# Stands before the sentinel, whose space a template would otherwise trim in an empty turn.
FILLER = " ."
# Characters of a text.
SHORT = 8
_QUESTION = {"role": "user", "content": "a"}
_PROBE = "titopool"
_PROBE_IN_REPR = re.compile(r"""['"]text['"]\s*:\s*['"]""" + _PROBE)


class Template(Protocol):
    """A model's chat template with its tokenizer."""

    def render(
        self, messages: Sequence[Message], images: Sequence[str], *, is_prompt: bool = True
    ) -> Ids:
        """The ids of the messages, with a generation prompt at the end if `is_prompt`.

        Args:
            images: in base64, those of the messages' image parts.
        """
        ...

    def decode(self, ids: Ids) -> str:
        """The text of ids, with special tokens."""
        ...


class LocalTemplate:
    """A transformers tokenizer's template; it renders what the server's render route does, but past calls
    of tools always with arguments as objects."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._tools = [_tool_in_order(tool) for tool in tools or ()] or None
        self._kwargs = dict(template_kwargs or {})

    def render(
        self, messages: Sequence[Message], images: Sequence[str], *, is_prompt: bool = True
    ) -> Ids:
        text = self._tokenizer.apply_chat_template(
            [self._with_content_as_accepted(message) for message in messages],
            tools=self._tools,
            add_generation_prompt=is_prompt,
            tokenize=False,
            **self._kwargs,
        )
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, ids: Ids) -> str:
        text: str = self._tokenizer.decode(ids.tolist())
        return text

    def _with_content_as_accepted(self, message: Message) -> Message:
        content: Any = message.get("content")
        is_list = isinstance(content, list)
        if message["role"] == "tool":
            if is_list and all(part.get("type") == "text" for part in content):
                return {**message, "content": "\n".join(part["text"] for part in content)}
            return message
        if self._accepts_parts:
            return message if is_list else {**message, "content": _as_parts(content)}
        if is_list:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message

    @cached_property
    def _accepts_parts(self) -> bool:
        """Whether the template accepts a list of parts as content, not only text."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._tokenizer.apply_chat_template([message], tokenize=False, **self._kwargs)
        except Exception:
            # Templates raise arbitrary errors over content that they do not expect.
            return False
        return _PROBE in text and not _PROBE_IN_REPR.search(text)


class ServerTemplate:
    """The template of the server's model."""

    def __init__(
        self,
        client: GenerationClient,
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

    def decode(self, ids: Ids) -> str:
        return self._client.detokenize(ids.tolist()) if len(ids) else ""


class Answer(NamedTuple):
    """A conversation rendered with new messages after a sampled turn."""

    # Text of everything up to the turn's end, as the template writes it.
    text_before: str
    # Ids and text of what follows the turn: its end-of-turn, the new messages, a generation prompt.
    ids: Ids
    text: str
    # How many of the first ids end the turn.
    num_closing: int


class TurnRenderer:
    """Renders what follows a sampled turn, which stays as it was sampled.

    In the rendered conversation a sentinel ends the turn's text, so the new ids are those after the
    sentinel's. Its ids are found with three renders of a short conversation.
    """

    def __init__(self, template: Template):
        self.template = template
        # The roles of messages that the template has been seen to write, with those before them.
        self._written = set[tuple[str, str]]()

    def render(self, messages: Sequence[Message], images: Sequence[str]) -> Ids:
        """The conversation as a prompt.

        Raises:
            ContextFull: as the template writes it, the model has no room for it.
        """
        try:
            return self.template.render(messages, images)
        except PromptTooLong as error:
            raise ContextFull(
                f"expected a conversation that the model has room for as its template writes it: "
                f"{error}; end the rollout"
            ) from error

    def answer(
        self, history: Sequence[Message], turn: str, new: Sequence[Message], images: Sequence[str]
    ) -> Answer | None:
        """What follows `turn`, the text of the assistant's message after `history`.

        None: the template drops the turn's text.

        Raises:
            ValueError: the new messages contain the sentinel.
            ContextFull: as `render`.
        """
        if SENTINEL.strip() in str(new):
            raise ValueError(
                f"messages: expected no word {SENTINEL.strip()!r}, which marks a turn's end"
            )
        ids, end = self._marked(history, turn, new, images)
        closing = self.closing
        if end is None:
            return None
        text_before, _, text = self.template.decode(ids).rpartition(SENTINEL)
        after = ids[end:]
        text_before = text_before.rstrip().removesuffix(FILLER.strip())
        return Answer(text_before, after, text, _num_equal(after, closing))

    def _marked(
        self, history: Sequence[Message], turn: str, new: Sequence[Message], images: Sequence[str]
    ) -> tuple[Ids, int | None]:
        """The rendered conversation with a sentinel after `turn`, and where the sentinel ends."""
        assistant = {"role": "assistant", "content": turn + FILLER + SENTINEL}
        ids = self.render([*history, assistant, *new], images)
        return ids, _end_of(self._marks[0], ids)

    @cached_property
    def openings(self) -> frozenset[int]:
        """The first ids of what follows a turn, of a template that does not end turns (GLM's)."""
        if len(self.closing):
            return frozenset()
        found = set[int]()
        for role in ("user", "tool"):
            try:
                ids, end = self._marked([_QUESTION], "b", [{"role": role, "content": "a"}], ())
            except Exception as error:
                # A template raises arbitrary errors, and the server says so by InvalidRequest.
                if isinstance(error, TitopoolError) and not isinstance(error, InvalidRequest):
                    raise
                continue
            found.update(ids[end : end + 1].tolist() if end is not None else ())
        return frozenset(found)

    def dropped(
        self,
        history: Sequence[Message],
        turn: str,
        new: Sequence[Message],
        images: Sequence[str],
        answer: Answer,
    ) -> Message | None:
        """The first of the new messages whose text changes nothing of `answer`; None: there is none."""
        before = "assistant"
        for index, message in enumerate(new):
            text, roles = _text_of(message), (message["role"], before)
            before = message["role"]
            # A call may stand for the text. A short text may stand in the template.
            if not text.strip() or message.get("tool_calls") or roles in self._written:
                continue
            if not (len(text) > SHORT and text.strip() in answer.text):
                # The template may have escaped or translated it.
                other = {**message, "content": text + FILLER + OTHER_SENTINEL}
                changed = [*new[:index], other, *new[index + 1 :]]
                try:
                    ids, end = self._marked(history, turn, changed, images)
                except ContextFull:
                    # The few tokens more have no room, and the message itself has.
                    continue
                if np.array_equal(ids[end:], answer.ids):
                    return message
            self._written.add(roles)
        return None

    @property
    def closing(self) -> Ids:
        """The ids that the template writes after a last turn."""
        return self._marks[1]

    @cached_property
    def _marks(self) -> tuple[Ids, Ids]:
        """The sentinel's ids, without those that depend on the text before it, and `closing`."""
        first, second, third = (
            self.template.render(
                [_QUESTION, {"role": "assistant", "content": content}], (), is_prompt=False
            )
            for content in ("b" + SENTINEL, "cc" + SENTINEL, "b" + OTHER_SENTINEL)
        )
        num_closing = _num_equal(first[::-1], third[::-1])
        num_both = _num_equal(first[::-1], second[::-1])
        if num_both <= num_closing:
            raise ValueError(
                "chat template: expected the text of an assistant's message in what it renders, got "
                "none; add ids in place of messages"
            )
        start, end = len(first) - num_both, len(first) - num_closing
        return first[start:end], first[end:]


def _end_of(part: Ids, ids: Ids) -> int | None:
    """The index after the last place of `part` in `ids`."""
    for start in np.flatnonzero(ids[: len(ids) - len(part) + 1] == part[0])[::-1]:
        if np.array_equal(ids[start : start + len(part)], part):
            return int(start) + len(part)
    return None


def _num_equal(first: Ids, second: Ids) -> int:
    """The length of the common beginning."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _text_of(message: Message) -> str:
    """The text of a message without images; "" of one with images, which stand in the ids too."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = [part.get("text") for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else ""


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _tool_in_order(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with its keys as the server gives them to the template, which may print them."""
    function = tool["function"]
    names = ("name", "description", "parameters")
    ordered = {name: function.get(name) for name in names}
    if (strict := function.get("strict")) is not None:
        ordered["strict"] = strict
    return {"type": "function", "function": ordered}
