"""A conversation as token ids: what was sampled is never tokenized again."""

import datetime
import hashlib
import operator
import unicodedata
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from titopool.conversations.interface import (
    ContextFull,
    GenerationClient,
    HistoryRewritten,
    Ids,
    Image,
    Message,
    MessageDropped,
    PromptResult,
)
from titopool.conversations.messages import image_file, read_messages
from titopool.conversations.rendering import Answer, LocalTemplate, ServerTemplate, TurnRenderer
from titopool.rollouts.sequence import RolloutArrays, Segment, arrays_of, sampled, written
from titopool.rollouts.state import State, arrays_at, image_ranges, placed_segments

OnRewrite = Literal["raise", "branch", "keep"]
# Stands for the messages of a prompt that came as ids.
UNKNOWN_PROMPT: Message = {"role": "user", "content": "a"}
# The role, in `Rollout.messages`, of ids that came without messages.
IDS_ROLE = "ids"
# These options look at the tokens that a request has sampled. Another request would begin anew.
NOT_RESUMED = (
    "structured_outputs",
    "structured_outputs_regex",
    "presence_penalty",
    "frequency_penalty",
)
# The last tokens of a prompt, in which a generation prompt may begin a thought.
PROMPT_END = 16
# These options are numbers of tokens, of which another request gets those that are left.
COUNTED = ("min_tokens", "thinking_token_budget")


@dataclass(frozen=True, eq=False)
class Turn:
    """What one call of `Rollout.generate` sampled."""

    ids: Ids
    # [tokens] float32.
    logprobs: Any
    # [tokens] int64.
    weight_versions: Any
    # `stop`, `length`, `repetition` or `abort`.
    finish_reason: str
    # All ids that the engine got, images expanded.
    prompt_ids: Ids


class Rollout:
    """A conversation as token ids, with who wrote each token.

    `generate` appends what was sampled. `add` appends the ids of new messages as the model's chat
    template renders them after the turn. Ids that were sampled or sent never change.

    Args:
        client: `titopool.Client`.
        messages: the conversation so far; the template is applied to it once, with a generation
            prompt. With `ids`, what the ids were rendered from.
        ids: the prompt's ids, in place of messages. Later messages are rendered as after
            `messages`, or after one message of a user.
        tokenizer: transformers' tokenizer, which renders here. None: the server's render route
            renders.
        tools: schemas of tools, for the template.
        images: for image parts that hold no image, or for the placeholders in `ids`; PIL images,
            bytes or base64 of files.
        chat_template_kwargs: further variables of the template.
        end_of_turn_ids: ids besides the template's own that end a turn, as Llama's `<|eom_id|>`.
            The template's end-of-turn does not follow them.
        max_context: the most tokens that the conversation may have. `generate` lowers `max_tokens`
            to what is left. `add` and `generate` raise `ContextFull` if no token is left. An image
            counts in full once the engine has placed it.
        on_rewrite: what `add` does if the template would render the turns so far in another way
            than they were sent or sampled, as Qwen3's drops earlier thinking: `raise`; `branch`: a
            new sequence begins with the template's ids as its prompt; `keep`: the new ids are
            appended all the same.
        session_id: sent with each request, so that turns go to the worker with the prefix.

    Raises:
        ValueError: neither messages nor ids, or images that do not fit.
    """

    def __init__(
        self,
        client: GenerationClient,
        *,
        messages: Iterable[Message] | None = None,
        ids: Any = None,
        tokenizer: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Image] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_of_turn_ids: Iterable[int] = (),
        max_context: int | None = None,
        on_rewrite: OnRewrite = "raise",
        session_id: str | None = None,
        renderer: TurnRenderer | None = None,
    ):
        if messages is None and ids is None:
            raise ValueError("expected messages or ids, got neither")
        if on_rewrite not in ("raise", "branch", "keep"):
            raise ValueError(f"on_rewrite: expected raise, branch or keep, got {on_rewrite!r}")
        self.client = client
        self.session_id = session_id or uuid.uuid4().hex
        self.max_context = max_context
        self.on_rewrite = on_rewrite
        # The place of its prompt among a runner's, why the runner ended it, and the error that did.
        self.prompt_index: int | None = None
        self.stop_reason: str | None = None
        self.error: Exception | None = None
        self.last_turn: Turn | None = None
        self._end_of_turn_ids = frozenset(end_of_turn_ids)
        self._renderer = renderer or make_renderer(client, tokenizer, tools, chat_template_kwargs)
        # Sequences that a rewrite has ended.
        self._ended: tuple[State, ...] = ()
        # The completions that were sampled, also parts of one turn.
        self._num_sampled = 0
        if ids is None:
            # Rendered when the ids are needed.
            self._begin = read_messages(messages or (), images)
            self._current: State | None = None
        else:
            read, found = read_messages(messages or (UNKNOWN_PROMPT,))
            files = (*found, *(image_file(image) for image in images or ()))
            segment = written(ids)
            self._current = State(
                segments=(segment,), images=files, history=read,
                unknown=None if messages else (None, segment.ids),
            )  # fmt: skip

    @property
    def _state(self) -> State:
        if self._current is None:
            state = self._rendered(*self._begin)
            self._check_room(state)
            self._current = state
        return self._current

    @property
    def ids(self) -> Ids:
        """All ids of the current sequence: the next prompt."""
        return self.arrays().ids

    @property
    def messages(self) -> list[Message]:
        """The conversation so far; sampled turns are decoded. Ids that came without messages have the
        role `ids`."""
        return self._messages_of(self._state)

    def _messages_of(self, state: State) -> list[Message]:
        parts: list[list[Message]] = []
        before: State | None = state
        while before is not None:
            part, state, before = list(before.history), before, None
            if state.unknown is not None:
                before, ids = state.unknown
                part[0] = {"role": IDS_ROLE, "content": self._renderer.template.decode(ids)}
            if state.turn is not None:
                part.append({"role": "assistant", "content": self._turn_text(state)})
            parts.append(part)
        return [message for part in reversed(parts) for message in part]

    @property
    def last_text(self) -> str:
        """The text of the turn that was sampled last, without its end-of-turn; "" if none is open."""
        return "" if self._state.turn is None else self._turn_text(self._state)

    @property
    def is_thinking(self) -> bool:
        """Whether the open turn is within a thought, `<think>…`, which its prompt or the model has
        begun."""
        if self._state.turn is None:
            return False
        prompts = [one for one in self._state.segments if not one.is_sampled]
        end = self._renderer.template.decode(prompts[-1].ids[-PROMPT_END:]) if prompts else ""
        begun = "<think>" if end.rstrip().endswith("<think>") else ""
        text = begun + self._turn_text(self._state)
        return text.rfind("<think>") > text.rfind("</think>")

    def generate(self, *, max_tokens: int = 16, num_resumes: int = 0, **sampling: Any) -> Turn:
        """Samples a completion and appends its ids. Without `add` between, a turn continues.

        Args:
            max_tokens: the most tokens of this call.
            num_resumes: how often a completion that an update or a pause aborted goes on from the
                ids so far. One with an option of `NOT_RESUMED` ends as `abort`, and a stop string
                across the cut is not found.
            sampling: further options of `Client.generate`. Each call, and each part of a turn, draws
                with a seed of its own (`derived_seed`).

        Raises:
            ContextFull: the conversation has `max_context` tokens or more.
            PromptChanged: the engine got other ids than those of the turns before.
        """
        left = self._room(max_tokens)
        if left < max_tokens and sampling.get("min_tokens"):
            sampling["min_tokens"] = min(sampling["min_tokens"], left)
        parts: list[Segment] = []
        prompt_ids, result = self._sample(left, sampling)
        while True:
            (completion,) = result.completions
            parts.append(sampled(completion))
            left -= len(parts[-1].ids)
            if completion.finish_reason != "abort" or len(parts) > num_resumes or left < 1:
                break
            if any(sampling.get(name) for name in NOT_RESUMED):
                break
            sampling = _for_the_rest(sampling, len(parts[-1].ids))
            _, result = self._sample(left, sampling)
        joined = arrays_of(tuple(parts))
        self.last_turn = Turn(
            ids=joined.ids,
            logprobs=joined.logprobs,
            weight_versions=joined.weight_versions,
            finish_reason=completion.finish_reason,
            prompt_ids=prompt_ids,
        )
        return self.last_turn

    def add(
        self,
        messages: Iterable[Message] | Message = (),
        *,
        ids: Any = None,
        images: Sequence[Image] | None = None,
    ) -> Ids:
        """Appends messages of a tool, a user or an environment, and returns their ids.

        The ids end the sampled turn if it has not ended itself, and end with a generation prompt.
        None of them counts for the loss. Before the next turn, messages may be added one by one.

        Args:
            ids: appended as they are, in place of messages; without an end-of-turn.
            images: as for the conversation's begin.

        Raises:
            HistoryRewritten: the template changes what was sampled or sent (see `on_rewrite`).
            MessageDropped: the template writes nothing of a message.
            ContextFull: the new ids leave no room for a token. The rollout stays as it was.
        """
        if ids is not None:
            segment = written(ids)
            files = tuple(image_file(image) for image in images or ())
            state = replace(
                self._state,
                segments=(*self._state.segments, segment),
                images=(*self._state.images, *files),
                turn=None, before=None, added=(), text=None,
                # The template knows nothing of these ids: later messages follow one of a user.
                history=(UNKNOWN_PROMPT,), unknown=(self._state, segment.ids),
            )  # fmt: skip
            self._check_room(state)
            self._current = state
            return segment.ids
        new, files = read_messages(
            [messages] if isinstance(messages, Mapping) else messages, images
        )
        state = self._state
        if state.turn is None and state.before is not None:
            # Nothing was sampled since the last messages: they are rendered together.
            new, files = state.added + new, state.added_images + files
            state = state.before
        if state.turn is None:
            after = self._prompt_with(state, new, files)
        else:
            after = self._answered(state, new, files)
        self._check_room(after)
        if after.num_sent < state.num_sent:
            self._ended = (*self._ended, state)
        self._current = after
        return after.segments[-1].ids

    def branch(self) -> "Rollout":
        """A rollout that shares everything so far and goes on by itself. With the same `seed` both draw
        the same numbers."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def arrays(self, tokenizer: Any = None) -> RolloutArrays:
        """The current sequence for a trainer; may be called after any turn.

        Args:
            tokenizer: transformers' tokenizer, which counts `num_drifted`.
        """
        return arrays_at(self._state, tokenizer)

    def sequences(self, tokenizer: Any = None) -> list[RolloutArrays]:
        """The sequences that a rewrite has ended, in order, and the current one."""
        return [arrays_at(one, tokenizer) for one in (*self._ended, self._state)]

    # Sampling.

    def _sample(self, max_tokens: int, sampling: Mapping[str, Any]) -> tuple[Ids, PromptResult]:
        """Sends the ids and appends a completion; returns the ids that the engine got, and all."""
        state = self._state
        sent = arrays_at(state).ids
        if (seed := sampling.get("seed")) is not None:
            sampling = {**sampling, "seed": derived_seed(seed, self._num_sampled)}
        (result,) = self.client.generate(
            [sent],
            images=[list(state.images)] if state.images else None,
            n=1,
            max_tokens=max_tokens,
            session_id=self.session_id,
            **sampling,
        )
        self._num_sampled += 1
        got = np.asarray(result.prompt_ids, np.int32)
        segments = placed_segments(state, sent, got)
        part = sampled(result.completions[0])
        # An abort may come before the engine has placed the images.
        has_begun = len(part.ids) > 0 or len(got) != len(sent)
        self._current = replace(
            state,
            segments=(*segments, part),
            ranges=image_ranges(result, len(state.images)),
            num_sent=len(got) + len(part.ids) if has_begun else state.num_sent,
            turn=(*(state.turn or ()), part.ids),
            before=None, added=(), added_images=(),
        )  # fmt: skip
        return got, result

    def _room(self, max_tokens: int) -> int:
        if self.max_context is None:
            return max_tokens
        self._check_room(self._state)
        return min(max_tokens, self.max_context - self._state.num_tokens)

    def _check_room(self, state: State) -> None:
        if self.max_context is not None and state.num_tokens >= self.max_context:
            raise ContextFull(
                f"expected at most {self.max_context - 1} tokens, so that one can be sampled within "
                f"max_context, got {state.num_tokens}; end the rollout, or raise max_context"
            )

    # Messages.

    def _rendered(self, history: tuple[Message, ...], images: tuple[str, ...]) -> State:
        """A sequence whose prompt is the rendered conversation."""
        ids = self._renderer.render(history, images)
        return State(
            segments=(written(ids),),
            images=images,
            history=history,
            text=ids,
            before=State(),
            added=history,
            added_images=images,
        )

    def _prompt_with(
        self, state: State, new: tuple[Message, ...], images: tuple[str, ...]
    ) -> State:
        if state.segments:
            raise ValueError(
                "add: expected a sampled turn before the messages, as the prompt came as ids; call "
                "generate first, or add ids"
            )
        return self._rendered(new, images)

    def _answered(self, state: State, new: tuple[Message, ...], images: tuple[str, ...]) -> State:
        """The state after the open turn is ended and new messages follow."""
        all_images = (*state.images, *images)
        turn, text = np.concatenate(state.turn or ()), self._turn_text(state)
        answer = self._renderer.answer(state.history, text, new, all_images)
        assistant = {"role": "assistant", "content": text}
        history = (*state.history, assistant, *new)
        expected = self._text_of(state) + _squeezed(text)
        if answer is not None:
            self._check_written(state, text, new, all_images, answer)
        if answer is None or _squeezed(answer.text_before) != expected:
            # Nothing can render ids that came without messages.
            if self.on_rewrite == "branch" and state.unknown is None:
                return self._rendered(history, all_images)
            if self.on_rewrite == "branch":
                raise HistoryRewritten(
                    "add: expected messages for the ids of this conversation, as the template rewrites "
                    "the turns so far and nothing can render ids; give messages with the ids at the "
                    'beginning, or use on_rewrite="keep"'
                )
            if self.on_rewrite == "raise" or answer is None:
                raise HistoryRewritten(
                    "add: expected a chat template that renders the turns so far as they were sent "
                    f"and sampled, got {_difference(expected, answer)}; use a template that keeps "
                    'them, or on_rewrite="branch" or "keep"'
                )
        ids = answer.ids[self._num_closed(turn, answer) :]
        return replace(
            state,
            segments=(*state.segments, written(ids)),
            images=all_images,
            history=history,
            text=expected + _squeezed(answer.text),
            turn=None,
            before=state,
            added=new,
            added_images=images,
        )

    def _check_written(
        self,
        state: State,
        text: str,
        new: tuple[Message, ...],
        images: tuple[str, ...],
        answer: Answer,
    ) -> None:
        if dropped := self._renderer.dropped(state.history, text, new, images, answer):
            raise MessageDropped(
                f"add: expected a chat template that writes the new messages, got nothing of the one of "
                f"{dropped['role']!r} after this turn; send it as a message of a user, or add ids"
            )

    def _num_closed(self, turn: Ids, answer: Answer) -> int:
        """How many of the ids that follow a turn the model has written itself."""
        closing = answer.ids[: answer.num_closing]
        if not len(closing):
            # GLM's turns end with the token that begins the next message.
            return _overlap(turn[-1:], answer.ids)
        if num := _overlap(turn, closing):
            return num
        return int(len(turn) > 0 and int(turn[-1]) in self._end_of_turn_ids)

    def _num_ended(self, turn: Ids) -> int:
        """How many of the last ids of a turn end it: those of the template, or one in their place."""
        if num := _overlap(turn, self._renderer.closing):
            return num
        ends = self._end_of_turn_ids | self._renderer.openings
        return int(len(turn) > 0 and int(turn[-1]) in ends)

    def _turn_text(self, state: State) -> str:
        """The text of the open turn, without its end-of-turn."""
        turn = np.concatenate(state.turn or ())
        num = self._num_ended(turn)
        return self._renderer.template.decode(turn[: len(turn) - num])

    def _text_of(self, state: State) -> str:
        """What the template should write for `history`, without blanks."""
        if isinstance(state.text, str):
            return state.text
        template = self._renderer.template
        if state.text is None:
            return _squeezed(template.decode(template.render(state.history, state.images)))
        return _squeezed(template.decode(state.text))


def make_renderer(
    client: GenerationClient,
    tokenizer: Any = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TurnRenderer:
    """A renderer that rollouts with the same template and tools can share."""
    if tokenizer is not None:
        # Templates that write today's date would rewrite the conversations at midnight.
        now = {"strftime_now": datetime.datetime.now().strftime}
        return TurnRenderer(
            LocalTemplate(tokenizer, tools, {**now, **(chat_template_kwargs or {})})
        )
    return TurnRenderer(ServerTemplate(client, tools, chat_template_kwargs))


def _overlap(turn: Ids, closing: Ids) -> int:
    """The length of the longest end of `turn` with which `closing` begins."""
    for length in range(min(len(turn), len(closing)), 0, -1):
        if np.array_equal(turn[len(turn) - length :], closing[:length]):
            return length
    return 0


def _squeezed(text: str) -> str:
    """The text without blanks, in one form of Unicode: templates trim and tokenizers normalize, which
    changes no id that was sampled."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _difference(expected: str, answer: Any) -> str:
    if answer is None:
        return "one that drops the text of the sampled turn"
    got = _squeezed(answer.text_before)
    start = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    return f"{got[start : start + 40]!r} where {expected[start : start + 40]!r} was"


def derived_seed(seed: int, *place: int) -> int:
    """A seed for a place, such as (prompt, sample) of a run or the number of a turn, of 62 bits.

    The same seed would draw the same random numbers at each place. At the first place, all zeros, it
    is the seed itself.

    Raises:
        TypeError: the seed is not an integer.
    """
    seed = operator.index(seed)
    if not any(place):
        return seed
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def _for_the_rest(sampling: Mapping[str, Any], num_sampled: int) -> dict[str, Any]:
    """The options for what is left of a completion after `num_sampled` more tokens."""
    counted = {name: sampling[name] for name in COUNTED if (sampling.get(name) or 0) > 0}
    return {**sampling, **{name: max(0, value - num_sampled) for name, value in counted.items()}}
