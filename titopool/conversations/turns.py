"""What a chat template writes after a sampled turn, whose ids stay as they are."""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from titopool.conversations.families import (
    Family,
    Harmony,
    Said,
    find_family,
    find_harmony,
    num_equal,
    or_none,
    read_harmony,
    read_mistral,
)
from titopool.conversations.interface import (
    ContextFull,
    Ids,
    Message,
    MessageDropped,
    TemplateRefused,
)
from titopool.conversations.templates import LocalTemplate, Rendered, Template
from titopool.errors import InvalidRequest, PromptTooLong, TitopoolError

# Ends a sampled turn's text. No text has this word, and no tokenizer merges it with the space before
# it or with what a template writes after a turn.
SENTINEL = " titopoolsentinel"
# Ends in another token than the sentinel.
OTHER_SENTINEL = " titopool7"
# Stands before the sentinel, whose space a template would otherwise trim in an empty turn.
FILLER = " ."
# Characters of a text.
SHORT = 8
# The last tokens of a prompt, in which a generation prompt may begin a thought.
PROMPT_END = 16
OPEN, CLOSE = "<think>", "</think>"
# How models begin and end thoughts in their text: most, and Gemma 4.
THOUGHTS = {OPEN: CLOSE, "<|channel>thought": "<channel|>"}
_THOUGHT = re.compile(
    "|".join(f"{re.escape(begin)}.*?(?:{re.escape(end)}|\\Z)" for begin, end in THOUGHTS.items()),
    re.DOTALL,
)
_QUESTION = {"role": "user", "content": "a"}
# What the template writes for a conversation up to the turn with these messages.
Write = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, eq=False)
class Turn:
    """A sampled turn that nothing follows yet."""

    # All ids before it, and its own.
    prompt: Ids
    ids: Ids
    # The messages of the prompt, and what the template has written for them, without blanks.
    history: Sequence[Message]
    write: Callable[[], str]
    # Ids besides the template's own that end a turn.
    ends: frozenset[int] = frozenset()
    # Its content, thought and calls, if they are known; None: they are read of its ids.
    message: Message | None = None

    @cached_property
    def text(self) -> str:
        return self.write()


class Following(NamedTuple):
    """What follows a turn."""

    # To be appended; None: that cannot be told.
    ids: Ids | None
    # The turn as the template gets it from here on.
    message: Message
    # What the template writes for all messages, without blanks.
    text: str
    # How the template writes the turns so far in another way than they were sent and sampled.
    difference: str | None = None


class TurnRenderer:
    """Renders what follows a sampled turn: by a renderer of the model's family, which is proved to write
    what the template does, or else by a difference.

    The difference: in the rendered conversation a sentinel ends the turn, so the new text is that after
    it. It is tokenized with the sentinel, whose ids are found with three renders of a short conversation.
    """

    def __init__(self, template: Template, *, finds_family: bool = True):
        """`finds_family`: False needs no package `renderers`, and always takes the difference."""
        self.template, self._finds_family = template, finds_family
        # Where the template has been seen to write messages: their role, the one before, after calls.
        self._written = set[tuple[str, str, bool]]()

    @property
    def info(self) -> dict[str, str]:
        """By what (`renderers`, `difference`), which renderer of the package, and why."""
        family, why = self._found
        if family is None:
            return {"rendering": "difference", "family": "", "why": why}
        return {"rendering": "renderers", "family": family.name, "why": why}

    @cached_property
    def _found(self) -> tuple[Family | None, str]:
        template = self.template
        if not self._finds_family:
            return None, "none was asked for"
        if not isinstance(template, LocalTemplate):
            return None, "the server's tokenizer renders; give the rollout one of its own"
        return find_family(template)

    def render(self, messages: Sequence[Message], images: Sequence[str]) -> Ids:
        """The conversation as a prompt.

        Raises:
            ContextFull: as the template writes it, the model has no room for it.
        """
        with _room_by_server():
            return self.template.render(messages, images)

    def write(self, messages: Sequence[Message], images: Sequence[str]) -> str:
        """As `render`, as text."""
        with _room_by_server():
            return self.template.text(messages, images)

    # What a turn says.

    def turn_text(self, turn: Turn) -> str:
        """The text of a turn, without its end-of-turn."""
        num = _overlap(turn.ids, self.closing)
        if not num and len(turn.ids):
            num = int(turn.ids[-1] in turn.ends | self.openings)
        return self.template.decode(turn.ids[: len(turn.ids) - num])

    def said(self, turn: Turn) -> Said:
        """Content, thought and calls of a turn, as far as its family is known; else its text."""
        family, _ = self._found
        # Nine letters and digits, as Mistral's template demands.
        call_ids = (f"c{len(turn.prompt) + index:08d}" for index in range(len(turn.ids) + 1))
        said: Said | None = None
        if family is not None:
            said = or_none(family.read, turn.prompt, turn.ids, call_ids)
        elif self._harmony is not None:
            said = or_none(read_harmony, self._harmony, turn.ids, call_ids)
        text = self.turn_text(turn)
        if said is None and "[TOOL_CALLS]" in text:
            said = read_mistral(text, call_ids)
        whole = self._begun_thought(turn) + text
        is_thinking = self.open_thought(turn) is not None
        has_no_tools = isinstance(self.template, LocalTemplate) and not self.template.tools
        if said is None or (said.calls and (has_no_tools or not _are_outside(said, whole))):
            return Said({"role": "assistant", "content": text}, None, is_thinking)
        return said._replace(is_thinking=said.is_thinking or is_thinking)

    def open_thought(self, turn: Turn) -> str | None:
        """What ends the thought in which a turn's text ends; None: that is no thought."""
        text = self._begun_thought(turn) + self.turn_text(turn)
        ends = (end for begin, end in THOUGHTS.items() if text.rfind(begin) > text.rfind(end))
        return next(ends, None)

    @cached_property
    def _harmony(self) -> Harmony | None:
        if not isinstance(self.template, LocalTemplate):
            return None
        return find_harmony(self.template.tokenizer)

    def _begun_thought(self, turn: Turn) -> str:
        """The opening of a thought that the generation prompt ends with."""
        end = self.template.decode(turn.prompt[-PROMPT_END:]) if len(turn.prompt) else ""
        return OPEN + "\n" if end.rstrip().endswith(OPEN) else ""

    def _forms(self, turn: Turn) -> Iterator[Message]:
        """The turn as a message, in the forms that templates may write as it was sampled."""
        said, text = turn.message or self.said(turn).message, self.turn_text(turn)
        plain = {"role": "assistant", "content": text}
        # Where the template rewrites all forms, it gets the structure.
        yield from [said, plain] if len(said) > len(plain) else [plain, said]
        if CLOSE in text:
            thought, _, content = text.partition(CLOSE)
            if begun := self._begun_thought(turn):
                yield {**plain, "content": begun + text}
            thought = thought.strip().removeprefix(OPEN).strip()
            yield {**plain, "reasoning_content": thought, "content": content.strip()}

    # What follows it.

    def follow(self, turn: Turn, new: Sequence[Message], images: Sequence[str]) -> Following:
        """What follows a turn: its end, new messages, a generation prompt.

        Args:
            images: in base64, of all image parts of the history and the new messages.

        Raises:
            ValueError: the new messages contain the sentinel.
            ContextFull: as `render`.
            MessageDropped: the template writes nothing of a new message.
            TemplateRefused: the template refuses the conversation.
        """
        if SENTINEL.strip() in str(new):
            raise ValueError(
                f"messages: expected no word {SENTINEL.strip()!r}, which marks a turn's end"
            )
        family, _ = self._found
        bridged = None
        if family is not None and not images:
            bridged = or_none(family.follow, turn.prompt, turn.ids, new, turn.ends)
        kept: Following | None = None
        dropped: MessageDropped | None = None
        refusal: Exception | None = None
        for form in self._forms(turn):
            try:
                if bridged is not None:
                    found = self._by_family(turn, form, new, images, bridged)
                else:
                    found = self._by_difference(turn, form, new, images)
            except MessageDropped as error:
                dropped = dropped or error
            except Exception as error:
                _check_is_template_s(error)
                refusal = refusal or error
            else:
                if found.difference is None:
                    return found
                kept = found if kept is None or kept.ids is None else kept
        if kept is not None and (kept.ids is not None or dropped is None):
            return kept
        if dropped is not None:
            raise dropped
        raise TemplateRefused(
            f"add: expected a chat template that takes the conversation with the new messages, got "
            f"{type(refusal).__name__}: {refusal}; send other messages, or add ids"
        ) from refusal

    def _by_family(
        self, turn: Turn, form: Message, new: Sequence[Message], images: Sequence[str], ids: Ids
    ) -> Following:
        def write(messages: Sequence[Message]) -> str:
            return self.write([*turn.history, form, *messages], images)

        text = write(new)
        whole = self.template.encode(text)
        if not np.array_equal(whole[len(whole) - len(ids) :], ids):
            # The renderer reads some messages in another way, or a turn that was cut.
            return self._by_difference(turn, form, new, images)
        self._check_written(write, new, text, self.template.decode(ids), "tool_calls" in form)
        return self._compared(turn, form, text, images, ids)

    def _by_difference(
        self, turn: Turn, form: Message, new: Sequence[Message], images: Sequence[str]
    ) -> Following:
        marked = _marked(form)

        def write(messages: Sequence[Message]) -> str:
            return self.write([*turn.history, marked, *messages], images)

        text = write(new)
        if (after := self._after(text)) is None:
            return Following(None, form, "", "one that drops the text of the sampled turn")
        if form.get("tool_calls"):
            alone = self.template.text([*turn.history, marked], images, is_prompt=False)
            num_closed = self._num_called(turn, after, self._after(alone))
            if num_closed is None:
                return Following(None, form, "", "one that does not end the turn as the model did")
            appended = after[num_closed:]
            self._check_written(write, new, text, self.template.decode(appended), True)
            whole = self.write([*turn.history, form, *new], images)
            return self._compared(turn, form, whole, images, appended)
        before, _, end = text.rpartition(SENTINEL)
        self._check_written(write, new, text, end, False)
        got = squeezed(before.rstrip().removesuffix(FILLER.strip()))
        expected = turn.text + squeezed(self.turn_text(turn))
        return Following(
            after[self._num_closed(turn, after) :],
            form,
            expected + squeezed(end),
            None if got == expected else _difference(expected, got),
        )

    def _after(self, text: str) -> Ids | None:
        """The ids of what a text has after the sentinel; None: it has none."""
        _, mark, after = text.rpartition(SENTINEL)
        if not mark:
            return None
        if isinstance(text, Rendered):
            ids = text.ids
        else:
            # What stands before the sentinel may be a part of its first token.
            ids = self.template.encode(FILLER + SENTINEL + after)
        end = _end_of(self._marks[0], ids)
        return None if end is None else ids[end:]

    def _compared(
        self, turn: Turn, form: Message, whole: str, images: Sequence[str], appended: Ids
    ) -> Following:
        """Compares what the template writes for all messages with the ids that the model will get."""
        text = squeezed(whole)
        parts = [[turn.ids, appended]]
        if len(turn.ids) and int(turn.ids[-1]) in turn.ends:
            # The model has ended the turn in another way than the template does.
            parts.append([turn.ids[:-1], self.closing, appended])
        sampled = [turn.text + squeezed(self.template.decode(np.concatenate(one))) for one in parts]
        expected = sampled[0]
        if text in sampled or self._keeps(turn, form, text, images, appended):
            return Following(appended, form, text)
        return Following(appended, form, expected, _difference(expected, text))

    def _keeps(
        self, turn: Turn, form: Message, text: str, images: Sequence[str], appended: Ids
    ) -> bool:
        """Whether the template writes all parts of a turn, though other blanks or quotes between them, and
        as it does where nothing follows."""
        alone = self.template.text([*turn.history, form], images, is_prompt=False)
        written = squeezed(alone).removesuffix(squeezed(self.template.decode(self.closing)))
        parts = [form.get(name) or "" for name in ("thinking", "reasoning_content", "content")]
        parts += [call["function"]["name"] for call in form.get("tool_calls") or ()]
        if not (form.keys() > {"role", "content"} and written.startswith(turn.text)):
            return False
        place = len(turn.text)
        for part in map(squeezed, parts):
            if (found := written.find(part, place)) < 0:
                return False
            place = found + len(part)
        return text.startswith(written) and text.endswith(squeezed(self.template.decode(appended)))

    def _check_written(
        self, write: Write, new: Sequence[Message], whole: str, after: str, has_calls: bool
    ) -> None:
        """Raises MessageDropped for the first of the new messages whose text changes nothing of what the
        template writes.

        Args:
            whole, after: what it writes, and what of that stands after the turn.
            has_calls: whether the turn is a message with calls, after which templates write more.
        """
        before = "turn"
        for index, message in enumerate(new):
            text, place = _text_of(message), (message["role"], before, has_calls)
            before = message["role"]
            # A call may stand for the text.
            if not text.strip() or message.get("tool_calls"):
                continue
            is_long = len(text) > SHORT
            # A short text may stand in the template.
            if (is_long and text.strip() in after) or (not is_long and place in self._written):
                continue
            # The template may have escaped or translated it.
            content: Any = text + FILLER + OTHER_SENTINEL
            if isinstance(message["content"], Mapping):
                content = {**message["content"], OTHER_SENTINEL.strip(): 7}
            other = {**message, "content": content}
            try:
                changed = write([*new[:index], other, *new[index + 1 :]])
            except ContextFull:
                # The few tokens more have no room, and the message itself has.
                continue
            if changed == whole:
                raise MessageDropped(
                    f"add: expected a chat template that writes the new messages, got nothing of the "
                    f"one of {message['role']!r} after this turn; send it as a message of a user, or "
                    "add ids"
                )
            self._written.add(place)

    # How turns end.

    def _num_closed(self, turn: Turn, after: Ids) -> int:
        """How many of the ids that the template writes after a turn's text the model has written itself."""
        closing = after[: num_equal(after, self.closing)]
        if num := _overlap(turn.ids, closing):
            return num
        if not len(closing) and not len(self.closing):
            # GLM's turns end with the token that begins the next message.
            return _overlap(turn.ids[-1:], after)
        if not len(closing) and _overlap(turn.ids, self.closing):
            # gpt-oss ends a turn with another token where another one follows.
            return num_equal(after, self._closing_within)
        return int(len(turn.ids) > 0 and int(turn.ids[-1]) in turn.ends)

    def _num_called(self, turn: Turn, after: Ids, alone: Ids | None) -> int | None:
        """The same of a turn with calls, which the sentinel's end of a call begins; None: it is not known.

        Args:
            alone: what the template writes after the sentinel where nothing follows the turn.
        """
        if alone is None or not len(turn.ids):
            return None
        ending = after[: num_equal(after, alone)]
        places = np.flatnonzero(ending == turn.ids[-1])
        if len(places):
            return int(places[-1]) + 1
        is_ended = int(turn.ids[-1]) in turn.ends or int(turn.ids[-1]) in self.closing
        return len(ending) if is_ended else None

    @property
    def closing(self) -> Ids:
        """The ids that the template writes after a last turn."""
        return self._marks[1]

    @cached_property
    def _closing_within(self) -> Ids:
        """The ids that the template writes after a turn that a generation prompt follows."""
        turn = {"role": "assistant", "content": "b" + SENTINEL}
        ids = self.template.render([_QUESTION, turn], ())
        short, prompt = (
            self.template.render([_QUESTION], (), is_prompt=is_prompt)
            for is_prompt in (False, True)
        )
        end, num_prompt = _end_of(self._marks[0], ids), len(prompt) - len(short)
        return self.closing if end is None else ids[end : len(ids) - num_prompt]

    @cached_property
    def openings(self) -> frozenset[int]:
        """The first ids of what follows a turn, of a template that does not end turns (GLM's)."""
        if len(self.closing):
            return frozenset()
        found = set[int]()
        for role in ("user", "tool"):
            turn, new = (
                _marked({"role": "assistant", "content": "b"}),
                {"role": role, "content": "a"},
            )
            try:
                after = self._after(self.write([_QUESTION, turn, new], ()))
            except Exception as error:
                _check_is_template_s(error)
                continue
            found.update([] if after is None else after[:1].tolist())
        return frozenset(found)

    @cached_property
    def _marks(self) -> tuple[Ids, Ids]:
        """The sentinel's ids, without those that depend on the text before it, and `closing`."""
        first, second, third = (
            self.template.render(
                [_QUESTION, {"role": "assistant", "content": content}], (), is_prompt=False
            )
            for content in ("b" + SENTINEL, "cc" + SENTINEL, "b" + OTHER_SENTINEL)
        )
        num_closing = num_equal(first[::-1], third[::-1])
        num_both = num_equal(first[::-1], second[::-1])
        if num_both <= num_closing:
            raise ValueError(
                "chat template: expected the text of an assistant's message in what it renders, got "
                "none; add ids in place of messages"
            )
        start, end = len(first) - num_both, len(first) - num_closing
        return first[start:end], first[end:]


@contextmanager
def _room_by_server() -> Iterator[None]:
    """The server's refusal of a conversation that is too long is `ContextFull`."""
    try:
        yield
    except PromptTooLong as error:
        raise ContextFull(
            f"expected a conversation that the model has room for as its template writes it: "
            f"{error}; end the rollout"
        ) from error


def squeezed(text: str) -> str:
    """The text without blanks, in one form of Unicode: templates trim and tokenizers normalize, which
    changes no id that was sampled."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _marked(form: Message) -> Message:
    """A turn that ends with the sentinel: in its last call, or in its text."""
    if not (calls := form.get("tool_calls")):
        return {**form, "content": form["content"] + FILLER + SENTINEL}
    function = {**calls[-1]["function"], "arguments": {"text": FILLER + SENTINEL}}
    return {**form, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}


def _are_outside(said: Said, text: str) -> bool:
    """Whether all calls stand outside of thoughts, in which the model only considers them."""
    outside = _THOUGHT.sub("", text)
    return all(call in outside or call not in text for call, _ in said.calls or ())


def _check_is_template_s(error: Exception) -> None:
    """Raises what is no error of a template: that may be any, and the server says so by InvalidRequest."""
    others = (ContextFull, OSError, RuntimeError, MemoryError, TitopoolError)
    if isinstance(error, others) and not isinstance(error, InvalidRequest):
        raise error


def _overlap(turn: Ids, closing: Ids) -> int:
    """The length of the longest end of `turn` with which `closing` begins."""
    for length in range(min(len(turn), len(closing)), 0, -1):
        if np.array_equal(turn[len(turn) - length :], closing[:length]):
            return length
    return 0


def _end_of(part: Ids, ids: Ids) -> int | None:
    """The index after the last place of `part` in `ids`."""
    for start in np.flatnonzero(ids[: len(ids) - len(part) + 1] == part[0])[::-1]:
        if np.array_equal(ids[start : start + len(part)], part):
            return int(start) + len(part)
    return None


def _difference(expected: str, got: str) -> str:
    start = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    return f"{got[start : start + 40]!r} where {expected[start : start + 40]!r} was"


def _text_of(message: Message) -> str:
    """The text of a message without images; "" of one with images, which stand in the ids too."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content) if isinstance(content, str | Mapping) else ""
    texts = [part.get("text") for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else ""
