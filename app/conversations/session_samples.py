"""What a trainer takes of a session: a sample for each end of its tree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.conversations.store import Session, SessionStore, Turn
from app.time_slices import give_way, sharing_time
from titopool.errors import TitopoolError
from titopool.wire.messages import ID_BYTES


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
            "models": [head.model for head in heads],
            "lora_versions": [head.lora_version for head in heads],
            "image_ranges": heads[-1].image_ranges,
        }


def all_turns(store: SessionStore, session: Session) -> list[Turn]:
    """All turns of a session, by number."""
    found = list[Turn]()
    while part := store.turns(session, found[-1].number + 1 if found else 0):
        found += part
        give_way()
    return found


def samples_of(turns: Sequence[Turn]) -> Iterator[SessionSample]:
    """A sample for each turn that nothing goes on from, by their numbers.

    Args:
        turns: all of a session.

    Raises:
        TitopoolError: as `_check_images`, before the first one.
    """
    by_number = {turn.number: turn for turn in turns}
    gone_on = {turn.parent for turn in turns}
    # The turns of equal requests from one place.
    equal = dict[tuple[int | None, bytes | None], list[Turn]]()
    for turn in turns:
        equal.setdefault((turn.parent, turn.asked), []).append(turn)
    paths = {turn.number: _path_to(turn, by_number) for turn in turns if turn.number not in gone_on}
    retried = {
        number: any(
            other.head.request_id != path[-1].head.request_id
            and (other.number > number or other.number in gone_on)
            for other in equal[path[-1].parent, path[-1].asked]
        )
        for number, path in paths.items()
    }
    # The turns that samples share count in the last one that was not retried.
    owners = dict[int, int]()
    for number in sorted(paths, key=lambda one: (retried[one], -one)):
        for turn in paths[number]:
            owners.setdefault(turn.number, number)
    for path in paths.values():
        _check_images(path)
    for number, path in sharing_time(paths.items()):
        counted = {turn.number for turn in path if owners[turn.number] == number}
        yield _sample(path, retried[number], counted)


def _path_to(end: Turn, by_number: dict[int, Turn]) -> list[Turn]:
    path = [end]
    while path[-1].parent is not None:
        path.append(by_number[path[-1].parent])
    return path[::-1]


def _starts_of(path: Sequence[Turn]) -> list[int]:
    """The index of each turn's first sampled token in the ids that the engine got."""
    starts, length = list[int](), 0
    for turn in path:
        sent = length + len(turn.prompt) // ID_BYTES
        # Images are expanded there.
        starts.append(len(turn.engine_prompt) // ID_BYTES or sent)
        length = starts[-1] + len(turn.ids) // ID_BYTES
    return starts


def _check_images(path: Sequence[Turn]) -> None:
    """Raises TitopoolError where images of earlier turns had other numbers of tokens in the last one."""
    whole = path[-1].engine_prompt
    for turn, start in zip(path, _starts_of(path), strict=True):
        if whole and turn is not path[-1] and not whole.startswith(turn.ids, start * ID_BYTES):
            raise TitopoolError(
                f"expected that the ids of turn {path[-1].number} go on from those of turn {turn.number}, got "
                "others, as images had other numbers of tokens; send such requests outside of a session"
            )


def _sample(path: list[Turn], was_retried: bool, counted: set[int]) -> SessionSample:
    """`counted`: the turns that count for the loss."""
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
        if turn.number in counted:
            loss_mask[start : start + len(turn.ids) // ID_BYTES] = 1
    return SessionSample(path, was_retried, ids, loss_mask, logprobs, starts[0])
