"""A conversation as token ids: what was sampled is never tokenized again."""

import hashlib
import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from titopool.client.results import PromptResult
from titopool.client.sync_client import Client
from titopool.conversations.families import Said
from titopool.conversations.interface import ContextFull, HistoryRewritten, Ids, Image, Message
from titopool.conversations.messages import IMAGE_PART, image_file, read_messages
from titopool.conversations.templates import make_template
from titopool.conversations.turns import CLOSE, TurnRenderer, squeezed
from titopool.conversations.turns import Turn as OpenTurn
from titopool.rollouts.sequence import RolloutArrays, Segment, arrays_of, sampled, written
from titopool.rollouts.state import State, image_ranges, placed_segments

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
        client: Client,
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
            begin = list(messages or (UNKNOWN_PROMPT,))
            fills = any(
                IMAGE_PART in one["content"]
                for one in begin
                if isinstance(one.get("content"), list)
            )
            read, found = read_messages(begin, images if fills else None)
            hidden = () if fills else tuple(image_file(image) for image in images or ())
            segment = written(ids)
            self._current = State(
                segments=(segment,), images=(*hidden, *found), num_hidden_images=len(hidden),
                history=read, unknown=None if messages else (None, segment.ids),
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
        """The conversation so far. The turn that was sampled last is decoded; earlier ones are as the
        template gets them, with their thoughts and calls apart where it needs that. Ids that came without
        messages have the role `ids`."""
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
                text = self._renderer.turn_text(self._open_turn(state))
                part.append({"role": "assistant", "content": text})
            parts.append(part)
        return [message for part in reversed(parts) for message in part]

    @property
    def info(self) -> dict[str, str]:
        """By what turns are rendered: `rendering` is `renderers`, the package, with its name of the
        `family`, or `difference`, of the template's texts; and `why`."""
        return self._renderer.info

    @property
    def last_text(self) -> str:
        """The text of the turn that was sampled last, without its end-of-turn; "" if none is open."""
        if self._state.turn is None:
            return ""
        return self._renderer.turn_text(self._open_turn(self._state))

    @property
    def last_said(self) -> Said | None:
        """What the turn that was sampled last says: its content, thought and calls, as far as the model's
        family is known, and otherwise its text; None if none is open."""
        if self._state.turn is None:
            return None
        return self._renderer.said(self._open_turn(self._state))

    @property
    def is_thinking(self) -> bool:
        """Whether the open turn is within a thought, which its prompt or the model has begun."""
        said = self.last_said
        return said is not None and said.is_thinking

    def close_thought(self, text: str | None = None) -> Ids:
        """Ends the thought of the open turn with ids that do not count for the loss, and returns them. The
        next `generate` goes on with the turn.

        Args:
            text: what ends the thought. None: `</think>` or Gemma 4's end, as the thought has begun.

        Raises:
            ValueError: no thought is open, or the text does not end it.
            ContextFull: as `add`.
        """
        if not self.is_thinking:
            raise ValueError("close_thought: expected a turn within a thought, got none")
        if text is None:
            end = self._renderer.open_thought(self._open_turn(self._state))
            text = f"\n{CLOSE}\n\n" if end == CLOSE else end or ""
        segment = written(self._renderer.template.encode(text))
        state = self._state
        closed = replace(
            state,
            segments=(*state.segments, segment),
            turn=(*(state.turn or ()), segment.ids),
        )
        self._check_room(closed)
        if self._renderer.said(self._open_turn(closed)).is_thinking:
            raise ValueError(
                f"close_thought: expected a text that ends the thought, got {text!r}; give `text`"
            )
        self._current = closed
        return segment.ids

    def generate(self, *, max_tokens: int = 16, num_resumes: int = 0, **sampling: Any) -> Turn:
        """Samples a completion and appends its ids. Without `add` between, a turn continues.

        Args:
            max_tokens: the most tokens of this call.
            num_resumes: how often a completion that an update or a pause aborted goes on from the
                ids so far. One with an option of `NOT_RESUMED`, and one that `client.abort()` ended,
                stay as `abort`.
            sampling: further options of `Client.generate`. Each call, and each part of a turn, draws
                with a seed of its own (`derived_seed`).

        Raises:
            ContextFull: the conversation has `max_context` tokens or more.
            PromptChanged: the engine got other ids than those of the turns before.
        """
        self._check_room(self._state)
        left = max_tokens
        if self.max_context is not None:
            left = min(left, self.max_context - self._state.num_tokens)
        if left < max_tokens and sampling.get("min_tokens"):
            sampling["min_tokens"] = min(sampling["min_tokens"], left)
        parts: list[Segment] = []
        before = [*(self._state.turn or ())]
        num_aborts = getattr(self.client, "num_aborts", 0)
        prompt_ids, result = self._sample(left, sampling)
        while True:
            (completion,) = result.completions
            finish_reason, part = completion.finish_reason, sampled(completion)
            if (num := self._num_until_stop(before, part, sampling)) is not None:
                finish_reason, part = "stop", part.first(num)
                self._current = self._state.with_last(part)
            parts.append(part)
            before.append(part.ids)
            left -= len(part.ids)
            if finish_reason != "abort" or len(parts) > num_resumes or left < 1:
                break
            if any(sampling.get(name) for name in NOT_RESUMED):
                break
            if getattr(self.client, "num_aborts", 0) != num_aborts:
                break
            sampling = _for_the_rest(sampling, len(part.ids))
            _, result = self._sample(left, sampling)
        joined = arrays_of(tuple(parts))
        self.last_turn = Turn(
            ids=joined.ids,
            logprobs=joined.logprobs,
            weight_versions=joined.weight_versions,
            finish_reason=finish_reason,
            prompt_ids=prompt_ids,
        )
        return self.last_turn

    def _num_until_stop(
        self, turn: Sequence[Ids], part: Segment, sampling: Mapping[str, Any]
    ) -> int | None:
        """The ids of a part up to the end of a stop string that began in the turn before; None: there is
        none. The engine, which got the part as a request of its own, looked for stop strings within it."""
        stop = sampling.get("stop") or ()
        stops = [stop] if isinstance(stop, str) else list(stop)
        # A token has at least one byte.
        longest = max((len(one.encode()) for one in stops), default=0)
        if not stops or not turn:
            return None
        before = np.concatenate(turn)[-longest:]
        if not len(before):
            return None
        decode = self._renderer.template.decode
        # A character may be cut, too.
        text_before = decode(before)
        start = len(text_before.rstrip("\ufffd"))
        last = start - (start == len(text_before))

        def has_stop(num: int) -> bool:
            text = decode(np.concatenate([before, part.ids[:num]]))
            places = [text.find(one, max(0, start - len(one) + 1)) for one in stops]
            return any(0 <= place <= last for place in places)

        nums = range(1 + (sampling.get("min_tokens") or 0), min(len(part.ids), longest) + 1)
        return next((num for num in nums if has_stop(num)), None) if has_stop(longest) else None

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
            TemplateRefused: the template raises an error over the conversation.
            ContextFull: the new ids leave no room for a token. The rollout stays as it was.
        """
        if ids is not None:
            segment = written(ids)
            files = tuple(image_file(image) for image in images or ())
            all_images = (*self._state.images, *files)
            state = replace(
                self._state,
                segments=(*self._state.segments, segment),
                images=all_images, num_hidden_images=len(all_images),
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
        if state.turn is not None:
            after = self._answered(state, new, files)
        elif state.segments:
            raise ValueError(
                "add: expected a sampled turn before the messages, as the prompt came as ids; call "
                "generate first, or add ids"
            )
        else:
            after = self._rendered(new, files)
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
        return self._state.arrays(tokenizer)

    def sequences(self, tokenizer: Any = None) -> list[RolloutArrays]:
        """The sequences that a rewrite has ended, in order, and the current one, as `arrays`."""
        return [one.arrays(tokenizer) for one in (*self._ended, self._state)]

    # Sampling.

    def _sample(self, max_tokens: int, sampling: Mapping[str, Any]) -> tuple[Ids, PromptResult]:
        """Sends the ids and appends a completion; returns the ids that the engine got, and all."""
        state = self._state
        sent = state.arrays().ids
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
            before=State(),
            added=history,
            added_images=images,
        )

    def _answered(self, state: State, new: tuple[Message, ...], images: tuple[str, ...]) -> State:
        """The state after the open turn is ended and new messages follow."""
        all_images = (*state.images, *images)
        found = self._renderer.follow(
            self._open_turn(state), new, all_images[state.num_hidden_images :]
        )
        history = (*state.history, found.message, *new)
        if found.difference is not None:
            # Nothing can render ids that came without messages.
            is_known = state.unknown is None and not state.num_hidden_images
            if self.on_rewrite == "branch" and is_known:
                return self._rendered(history, all_images)
            if self.on_rewrite == "branch":
                raise HistoryRewritten(
                    "add: expected messages for the ids of this conversation, as the template rewrites "
                    "the turns so far and nothing can render ids; give messages with the ids at the "
                    'beginning, or use on_rewrite="keep"'
                )
            if self.on_rewrite == "raise" or found.ids is None:
                raise HistoryRewritten(
                    "add: expected a chat template that renders the turns so far as they were sent "
                    f"and sampled, got {found.difference}; use a template that keeps them, or "
                    'on_rewrite="branch" or "keep"'
                )
        assert found.ids is not None
        return replace(
            state,
            segments=(*state.segments, written(found.ids)),
            images=all_images,
            history=history,
            text=found.text,
            turn=None,
            before=state,
            added=new,
            added_images=images,
        )

    def _open_turn(self, state: State) -> OpenTurn:
        """The turn that was sampled last, with what is before it."""
        ids, turn = state.arrays().ids, np.concatenate(state.turn or ())
        return OpenTurn(
            prompt=ids[: len(ids) - len(turn)],
            ids=turn,
            history=state.history,
            write=lambda: self._text_of(state),
            ends=self._end_of_turn_ids,
        )

    def _text_of(self, state: State) -> str:
        """What the template should write for `history`, without blanks."""
        if state.text is not None:
            return state.text
        images = state.images[state.num_hidden_images :]
        return squeezed(self._renderer.template.text(state.history, images))


def make_renderer(
    client: Client,
    tokenizer: Any = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TurnRenderer:
    """A renderer that rollouts with the same template and tools can share."""
    return TurnRenderer(make_template(client, tokenizer, tools, chat_template_kwargs))


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
