"""What a trainer takes of a session: a sample for each end of its tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.conversations.store import Session, SessionStore, Turn


@dataclass(frozen=True, eq=False)
class SessionSample:
    """The turns from the first one to one that nothing goes on from."""

    turns: list[Turn]
    # Whether the client sent the last turn's request again and did not go on from this answer.
    was_retried: bool
    # All ids as the engine got and sampled them, int32.
    ids: np.ndarray
    # 1 at each sampled token that counts for the loss, uint8. A turn that several samples have counts in
    # one of them.
    loss_mask: np.ndarray
    # float32; 0 at tokens that were not sampled.
    logprobs: np.ndarray
    # Of the first sampled token.
    prompt_length: int

    def fields(self) -> dict[str, Any]:
        """As `titopool.answers.sessions.SampleAnswer`."""
        heads, starts = [turn.head for turn in self.turns], _starts_of(self.turns)
        return {
            "turns": [turn.number for turn in self.turns],
            "reasons": [head.reason for head in heads],
            "was_retried": self.was_retried,
            "prompt_length": self.prompt_length,
            "ids": self.ids,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "weight_versions": [
                [version, start + index]
                for head, start in zip(heads, starts, strict=True)
                for version, index in head.weight_versions
            ],
            "finish_reasons": [head.finish_reason for head in heads],
            "image_ranges": heads[-1].image_ranges,
        }


def all_turns(store: SessionStore, session: Session) -> list[Turn]:
    """All turns of a session, by number."""
    found = list[Turn]()
    while part := store.turns(session, found[-1].number + 1 if found else 0):
        found += part
    return found


def samples_of(turns: Sequence[Turn]) -> list[SessionSample]:
    """A sample for each turn that nothing goes on from, by their numbers.

    Args:
        turns: all of a session.
    """
    by_number = {turn.number: turn for turn in turns}
    gone_on = {turn.parent for turn in turns}
    ends = [turn for turn in turns if turn.number not in gone_on]
    retried = {end.number: _is_retried(end, turns) for end in ends}
    # The turns that samples share count in the last one that was not retried.
    counted = set[int]()
    found = dict[int, SessionSample]()
    for end in sorted(ends, key=lambda one: (retried[one.number], -one.number)):
        path = _path_to(end, by_number)
        found[end.number] = _sample(path, retried[end.number], counted)
        counted.update(turn.number for turn in path)
    return [found[number] for number in sorted(found)]


def _is_retried(end: Turn, turns: Sequence[Turn]) -> bool:
    return any(
        one.number > end.number and one.head.reason == "retry"
        and (one.parent, one.asked) == (end.parent, end.asked)
        for one in turns
    )  # fmt: skip


def _path_to(end: Turn, by_number: dict[int, Turn]) -> list[Turn]:
    path = [end]
    while path[-1].parent is not None:
        path.append(by_number[path[-1].parent])
    return path[::-1]


def _starts_of(path: Sequence[Turn]) -> list[int]:
    """The index of each turn's first sampled token in the ids that the engine got."""
    starts, length = list[int](), 0
    for turn in path:
        sent = length + len(turn.prompt) // 4
        # Images are expanded there.
        starts.append(len(turn.engine_prompt) // 4 or sent)
        length = starts[-1] + len(turn.ids) // 4
    return starts


def _sample(path: list[Turn], was_retried: bool, counted: set[int]) -> SessionSample:
    starts = _starts_of(path)
    if path[-1].engine_prompt:
        raw = path[-1].engine_prompt + path[-1].ids
    else:
        raw = b"".join(turn.prompt + turn.ids for turn in path)
    ids = np.frombuffer(raw, np.int32)
    loss_mask, logprobs = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32)
    for turn, start in zip(path, starts, strict=True):
        values = np.frombuffer(turn.logprobs, np.float32)
        logprobs[start : start + len(values)] = values
        if turn.number not in counted:
            loss_mask[start : start + len(turn.ids) // 4] = 1
    return SessionSample(path, was_retried, ids, loss_mask, logprobs, starts[0])
