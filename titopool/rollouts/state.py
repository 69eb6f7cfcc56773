"""A conversation at one moment: its tokens, its images and the messages that they were rendered from."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from titopool.client.results import PromptResult
from titopool.conversations.families import num_equal
from titopool.conversations.interface import Ids, Message, PromptChanged
from titopool.rollouts.sequence import RolloutArrays, Segment, arrays_of, written


@dataclass(frozen=True, eq=False)
class State:
    """A conversation at one moment. Branches share it, so it never changes."""

    segments: tuple[Segment, ...] = ()
    images: tuple[str, ...] = ()
    # How many of the first images stand in no message of `history`, but in ids that came without any.
    num_hidden_images: int = 0
    # Offset and length of the images that the engine has placed.
    ranges: tuple[tuple[int, int], ...] | None = ()
    # How many tokens the engine has got or sampled; images in them are expanded.
    num_sent: int = 0
    # Messages of all tokens but those of the open turn.
    history: tuple[Message, ...] = ()
    # What the template has written for `history`, without blanks; None: unknown.
    text: str | None = None
    # The ids of the assistant's turn that nothing has ended yet; None: the model is to begin one.
    turn: tuple[Ids, ...] | None = None
    # The state before the messages that were added last, and these messages; they are rendered
    # again with those that follow before the next turn.
    before: "State | None" = None
    added: tuple[Message, ...] = ()
    added_images: tuple[str, ...] = ()
    # Ids that came without messages, for which the first one of `history` stands, and the state
    # before them; None: they begin the conversation.
    unknown: "tuple[State | None, Ids] | None" = None

    def with_last(self, segment: Segment) -> "State":
        """With less of what was sampled last."""
        num_less = len(self.segments[-1].ids) - len(segment.ids)
        return replace(
            self,
            segments=(*self.segments[:-1], segment),
            turn=(*(self.turn or ())[:-1], segment.ids),
            num_sent=self.num_sent - num_less,
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(one.ids) for one in self.segments)

    def arrays(self, tokenizer: Any = None) -> RolloutArrays:
        return arrays_of(self.segments, self.images, self.ranges, tokenizer)


def placed_segments(state: State, sent: Ids, got: Ids) -> tuple[Segment, ...]:
    """The segments of a prompt as the engine got it: new images are expanded.

    Raises:
        PromptChanged: the engine got other ids than were sent.
    """
    if np.array_equal(sent, got):
        return state.segments
    start = state.num_sent
    if not state.images or not np.array_equal(sent[:start], got[:start]):
        raise PromptChanged(
            f"expected the engine to get the {len(sent)} ids that were sent, got {len(got)} ids, of "
            f"which the first {num_equal(sent, got)} are equal; the conversation cannot go on"
        )
    kept: list[Segment] = []
    length = 0
    for one in state.segments:
        if length >= start:
            break
        kept.append(one)
        length += len(one.ids)
    return (*kept, written(got[start:]))


def image_ranges(result: PromptResult, num_images: int) -> tuple[tuple[int, int], ...] | None:
    """Offset and length of each image in the prompt; None: an abort came before they were placed."""
    found = result.image_ranges
    return tuple((int(a), int(b)) for a, b in found) if len(found) == num_images else None
