"""What the processes of a pool tell each other of it, and which of two tales holds."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from titopool.wire.pool_state import (
    AdapterRecord,
    PoolAdapters,
    PoolPause,
    PoolState,
    PoolWeights,
    next_clock,
)
from workers.ledger import Ledger
from workers.weights.pool_view import PoolView

FIRST = PoolWeights(1, "a", 7, False)


def state(**parts) -> PoolState:
    return PoolState(model="m", **parts)


def view(run_dir: str = "", model: str = "m") -> tuple[PoolView, list[str]]:
    news: list[str] = []
    made = PoolView(Ledger(run_dir, "0"), lambda: news.append("news"))
    made.start(model)
    return made, news


def test_the_later_part_holds_whoever_tells_it():
    old = state(pause=PoolPause(3, "keep", 5.0), weights=FIRST)
    new = state(pause=PoolPause(4), weights=PoolWeights(2, "b", 3, False))
    for one, other in ((old, new), (new, old)):
        merged = one.merged(other)
        assert (merged.pause, merged.weights) == (new.pause, new.weights)


def test_all_orders_of_telling_come_to_the_same():
    chance = random.Random(1)
    tales = [
        state(
            weights=PoolWeights(chance.randrange(3), chance.choice("ab"), 0, False),
            pause=PoolPause(number // 2, chance.choice(["keep", None]), 1.0),
            adapters=PoolAdapters(
                chance.randrange(2), {chance.choice("xy"): AdapterRecord(number, "/f")}
            ),
        )
        for number in range(4)
    ]
    ends = set()
    for order in itertools.permutations(tales):
        known = PoolState()
        for tale in order:
            known = known.merged(tale)
        ends.add(msgspec.json.encode(known))
    assert len(ends) == 1


def test_a_pool_with_another_model_tells_nothing():
    mine = state()
    assert mine.merged(PoolState(model="other", weights=FIRST)) is mine
    assert mine.merged(PoolState()) is mine


def test_nothing_new_is_told_apart():
    mine = state(weights=FIRST)
    assert mine.merged(state(weights=FIRST)) is mine


def test_what_is_not_there_travels_in_few_bytes():
    assert len(msgspec.msgpack.encode(PoolState(model="m"))) < 20


def test_a_worker_hears_of_its_pool_before_it_has_a_model():
    made = PoolView(Ledger("", "0"), lambda: None)
    made.merge(state(weights=FIRST))
    made.start("m")
    assert made.weights == FIRST
    other = PoolView(Ledger("", "0"), lambda: None)
    other.merge(state(weights=FIRST))
    other.start("another model")
    assert other.weights == PoolWeights()


def test_only_what_is_new_is_told_on():
    made, news = view()
    made.merge(state(weights=FIRST))
    made.merge(state(weights=FIRST))
    assert news == ["news"]


def test_the_lease_of_a_pause_runs_on_while_it_travels(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("workers.weights.pool_view.time", SimpleNamespace(monotonic=lambda: now))
    made, _ = view()
    made.merge(state(pause=PoolPause(1, "keep", 3.0)))
    now += 1
    assert made.pause == PoolPause(1, "keep", 2.0)
    now += 2
    assert made.pause == PoolPause(1, None, 0.0)


def test_each_change_counts_more_than_all_that_was_known():
    made, _ = view()
    made.merge(state(pause=PoolPause(5, "keep", 9.0)))
    made.record_pause(None, 0.0, clock=2)
    assert made.pause.clock == 6
    made.merge(state(adapters=PoolAdapters(8, {})))
    made.record_adapter("a", AdapterRecord(1, "/f"), 9)
    made.record_adapter("b", AdapterRecord(1, "/g"), 0)
    made.record_adapter("a", None, 0)
    assert (made.adapters.clock, list(made.adapters.by_name)) == (11, ["b"])


def test_what_a_pool_does_after_it_has_forgotten_all_counts_more_than_that():
    # A front end that could reach nobody knows of it still.
    before = state(
        weights=PoolWeights(900, "old", 3, False), pause=PoolPause(900, "keep", 60.0),
        adapters=PoolAdapters(900, {"a": AdapterRecord(3, "/f")}),
    )  # fmt: skip
    made, _ = view()
    made.record_pause("drain", 5.0, 0)
    made.record_adapter("a", AdapterRecord(1, "/g"), 0)
    made.record_weights(PoolWeights(next_clock(0), "new", 1, False))
    made.merge(before)
    assert made.pause.mode == "drain"
    assert made.adapters.by_name == {"a": AdapterRecord(1, "/g")}
    assert made.weights.update_id == "new"
    assert next_clock(7) == 8


def test_a_lease_that_has_expired_holds_nobody_who_starts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0
    monkeypatch.setattr("workers.ledger.time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr("workers.weights.pool_view.time", SimpleNamespace(monotonic=lambda: now))
    made, _ = view(str(tmp_path))
    made.record_pause("keep", 10.0, 1)
    loading = PoolView(Ledger("", "0"), lambda: None)
    loading.merge(made.state)
    now += 4
    soon, _ = view(str(tmp_path))
    assert soon.pause == PoolPause(made.pause.clock, "keep", 6.0)
    now += 7
    late, _ = view(str(tmp_path))
    # Nor whoever was loading when the lease ended.
    loading.start("m")
    for one in (late, loading):
        assert one.pause == PoolPause(made.pause.clock, None, 0.0)


def test_the_process_that_comes_after_knows_it_all(tmp_path: Path):
    made, _ = view(str(tmp_path))
    made.record_weights(FIRST)
    made.record_adapter("a", AdapterRecord(1, "/f", "x"), 1)
    after, _ = view(str(tmp_path))
    assert after.weights == FIRST
    assert after.adapters == made.adapters
    # Another worker, and another model.
    assert PoolView(Ledger(str(tmp_path), "1"), lambda: None).weights == PoolWeights()
    assert view(str(tmp_path), model="other")[0].weights == PoolWeights()


def test_a_ledger_that_cannot_be_written_or_read_undoes_nothing(tmp_path: Path, caplog):
    made, _ = view(str(tmp_path / "nowhere"))
    made.record_weights(FIRST)
    made.record_adapter("a", AdapterRecord(1, "/f"), 1)
    assert made.weights == FIRST
    assert "could not be written" in caplog.text
    for torn in (b"{half", b'{"model": "\xff"}'):
        (tmp_path / "worker-state-0").write_bytes(torn)
        assert Ledger(str(tmp_path), "0").read() == PoolState()
    assert "cannot be read" in caplog.text


def test_workers_on_hosts_of_one_domain_have_files_of_their_own(tmp_path: Path):
    for name in ("n1.lan", "n1.wan"):
        Ledger(str(tmp_path), name).write(state(weights=PoolWeights(1, name)))
    for name in ("n1.lan", "n1.wan"):
        assert Ledger(str(tmp_path), name).read().weights.update_id == name
