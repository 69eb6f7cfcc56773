"""What a turn keeps of what the engine got and sampled."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.conversations.session_samples import ends_of, sample_of
from app.conversations.store import Maker, Session, SessionStore
from app.conversations.turn import IDS, SessionTurn, _tail_of
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import Completed, Completion, RoutedExperts


def packed(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


class Player:
    """Plays turns by ids, as an engine that expands images would."""

    def __init__(self, folder: Path):
        self.store = SessionStore(folder, max_bytes=2**30, max_sessions=10, keep_s=100.0)
        self.name = self.store.make(Maker("ada", 1), {})
        # The first row that each turn asked for.
        self.starts: list[int | None] = []

    @property
    def session(self) -> Session:
        return self.store.find(self.name)

    def play(self, sent: bytes, engine: bytes, *ids: int, num_rows: int | None = None) -> None:
        """`engine`: what it got, images expanded; `num_rows`: of experts, by default all."""
        facts: Any = SimpleNamespace(model="tiny", routed_expert_bytes=1)
        turn = SessionTurn(self.store, self.session, self.name, "/v1/completions", facts)
        turn.prompt_of_raw(IDS, sent, lambda new, _: np.frombuffer(new, np.int32), lambda _: "")
        options = SamplingOptions()
        at_end = turn.begin(f"r{len(self.starts)}", "", options)
        start = options.routed_experts_prompt_start or 0
        self.starts.append(start)
        length = len(engine) // 4 + len(ids) - 1
        experts = None
        if num_rows != 0:
            rows = bytes(range(start, num_rows or length))
            experts = RoutedExperts(rows, (len(rows), 1, 1), "uint8", start)
        completion = Completion(packed(*ids), "length", None, [(0, 0)], routed_experts=experts)
        turn.take(
            Completed(
                job_id=1, attempt=1, completions=[completion], num_cached_tokens=0,
                prompt_token_ids=b"" if engine == sent else engine,
            )
        )  # fmt: skip
        turn.keep()
        at_end()

    def samples(self) -> list[Any]:
        return [
            sample_of(self.store, self.session, end)
            for end in ends_of(self.store.turns(self.session))
        ]


@pytest.fixture
def player(tmp_path: Path) -> Player:
    return Player(tmp_path)


def test_each_turn_asks_for_the_rows_that_are_missing(player: Player):
    first = packed(1, 2)
    player.play(first, first, 10, 11)
    second = first + packed(10, 11, 3)
    player.play(second, second, 12, num_rows=0)
    third = second + packed(12, 4)
    player.play(third, third, 13)
    assert player.starts == [0, 3, 0]
    (sample,) = player.samples()
    assert sample.ids.tolist() == [1, 2, 10, 11, 3, 12, 4, 13]
    assert list(sample.routed_experts.data) == list(range(7))


def test_a_turn_whose_images_have_other_numbers_of_tokens_begins_a_branch(player: Player):
    first = packed(1, 99)
    player.play(first, packed(1, 99, 99), 10)
    second = first + packed(10, 3)
    player.play(second, packed(1, 99, 99, 99, 10, 3), 11)
    turns = player.store.turns(player.session)
    assert [(one.parent, one.head.reason) for one in turns] == [(None, "first"), (None, "template")]
    kept, moved = player.samples()
    assert (kept.ids.tolist(), kept.loss_mask.tolist()) == ([1, 99, 99, 10], [0, 0, 0, 1])
    assert moved.ids.tolist() == [1, 99, 99, 99, 10, 3, 11]
    assert moved.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1]
    # Its rows began after those of the turn that it was to go on from.
    assert moved.routed_experts is None
    third = second + packed(11, 4)
    player.play(third, packed(1, 99, 99, 99, 10, 3, 11, 4), 12)
    assert player.starts == [0, 3, 0]
    _, whole = player.samples()
    assert whole.turns[-1].parent == 1
    assert list(whole.routed_experts.data) == list(range(8))


@pytest.mark.parametrize(
    "whole, text, tail",
    [
        ("ab", "ab", b""), ("ab</s>", "ab", b"</s>"), ("ax", "ab", None),
        # The last id is one byte of a character that never came.
        ("ab\ufffd", "ab", b""), ("ab\ufffd</s>", "ab", b"</s>"), ("ab\ufffd", "ab\ufffd", b""),
    ],
)  # fmt: skip
def test_what_follows_a_text_has_no_half_character(whole: str, text: str, tail: bytes | None):
    turn: Any = SimpleNamespace(ids=packed(1), head=SimpleNamespace(message={"content": text}))
    assert _tail_of(turn, lambda ids: whole) == tail
