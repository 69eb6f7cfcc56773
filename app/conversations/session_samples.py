"""What a trainer takes of a session: a sample for each end of its tree, read one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from app.conversations.store import Session, SessionStore, Turn, engine_ids_along
from app.time_slices import sharing_time
from titopool.wire.messages import ID_BYTES, RoutedExperts

COLUMNS = ("prompt", "ids", "logprobs", "engine_prompt", "experts")


@dataclass(frozen=True, eq=False)
class SessionSample:
    """The turns from the first one to one that nothing goes on from."""

    turns: list[Turn]
    # Whether the client sent the last turn's request more than once, and this answer is not the last one or
    # another one was gone on from.
    was_retried: bool
    # All ids as the engine got and sampled them, int32.
    ids: np.ndarray
    # 1 at each sampled token that counts for the loss, uint8. A turn that several samples have counts in
    # one of them.
    loss_mask: np.ndarray
    # float32; 0 at tokens that were not sampled.
    logprobs: np.ndarray
    # Of all ids but the last one; None: the server does not return them, or a turn was aborted before it
    # had all.
    routed_experts: RoutedExperts | None
    # Files as the client sent them, one for each of the image ranges.
    images: list[bytes]

    @property
    def prompt_length(self) -> int:
        """The index of the first sampled token."""
        return self.turns[0].head.num_prompt

    def fields(self) -> dict[str, Any]:
        """As `titopool.answers.sessions.SampleAnswer`."""
        heads = [turn.head for turn in self.turns]
        return {
            "turns": [turn.number for turn in self.turns],
            "reasons": [head.reason for head in heads],
            "was_retried": self.was_retried,
            "prompt_length": self.prompt_length,
            "ids": self.ids,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "weight_versions": [
                [version, head.num_prompt + index]
                for head in heads
                for version, index in head.weight_versions
            ],
            "finish_reasons": [head.finish_reason for head in heads],
            "models": [head.model for head in heads],
            "lora_versions": [head.lora_version for head in heads],
            "image_ranges": heads[-1].image_ranges,
            "images": self.images,
            "routed_experts": self.routed_experts,
        }


@dataclass(frozen=True)
class SampleEnd:
    """An end of the tree: what is known of a sample before its ids are read."""

    turn: Turn
    was_retried: bool
    # The numbers of the turns that count for the loss.
    counted: frozenset[int]


def ends_of(turns: Sequence[Turn]) -> list[SampleEnd]:
    """The turns that nothing goes on from, by their numbers.

    Args:
        turns: all of a session.
    """
    by_number = {turn.number: turn for turn in turns}
    gone_on = {turn.parent for turn in turns}
    # The turns of equal requests from one place.
    equal = dict[tuple[int | None, bytes | None], list[Turn]]()
    for turn in turns:
        equal.setdefault((turn.parent, turn.asked), []).append(turn)
    ends = [turn for turn in turns if turn.number not in gone_on]
    retried = {
        end.number: any(
            other.head.request_id != end.head.request_id
            and (other.number > end.number or other.number in gone_on)
            for other in equal[end.parent, end.asked]
        )
        for end in ends
    }
    # The turns that samples share count in the last one that was not retried.
    owned = set[int]()
    counted = dict[int, set[int]]()
    for end in sharing_time(sorted(ends, key=lambda one: (retried[one.number], -one.number))):
        own = counted[end.number] = set()
        number: int | None = end.number
        # Where another sample has a turn, it has those before too.
        while number is not None and number not in owned:
            owned.add(number)
            own.add(number)
            number = by_number[number].parent
    return [SampleEnd(end, retried[end.number], frozenset(counted[end.number])) for end in ends]


def sample_of(
    store: SessionStore, session: Session, end: SampleEnd, *, with_images: bool = True
) -> SessionSample:
    """
    Raises:
        SessionEnded: the session was deleted meanwhile.
        TitopoolError: the sessions' file cannot be used.
    """
    path = store.path_to(session, end.turn.number, COLUMNS)
    images = store.images(session, end.turn.head.images) if with_images else []
    ids = engine_ids_along(path)
    loss_mask, logprobs = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32)
    for turn in path:
        start, values = turn.head.num_prompt, np.frombuffer(turn.logprobs, np.float32)
        logprobs[start : start + len(values)] = values
        if turn.number in end.counted:
            loss_mask[start : start + len(turn.ids) // ID_BYTES] = 1
    experts = _experts_along(path, len(ids) - 1)
    return SessionSample(path, end.was_retried, ids, loss_mask, logprobs, experts, images)


def _experts_along(path: Sequence[Turn], num_rows: int) -> RoutedExperts | None:
    """The rows of all turns; None: some are missing."""
    rows, known = bytearray(), path[-1].head.experts
    if known is None or known.end != num_rows:
        return None
    width = prod(known.shape[1:]) * np.dtype(known.dtype).itemsize
    for turn in path:
        own = turn.head.experts
        if own is None:
            # A later turn has brought all rows.
            continue
        if own.start * width > len(rows):
            return None
        del rows[own.start * width :]
        rows += turn.experts
    return RoutedExperts(bytes(rows), (num_rows, *known.shape[1:]), known.dtype, 0)
