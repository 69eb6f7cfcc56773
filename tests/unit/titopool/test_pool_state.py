"""The pool's state: how processes merge, keep and restore it."""

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
from workers.weights.pool_copy import PoolCopy

FIRST = PoolWeights(1, "a", 7, False)


def state(**records) -> PoolState:
    return PoolState(model="m", **records)


def view(run_dir: str = "", model: str = "m") -> tuple[PoolCopy, list[str]]:
    changes: list[str] = []
    made = PoolCopy(Ledger(run_dir, "0"), lambda: changes.append("news"))
    made.start(model)
    return made, changes


def test_a_merge_keeps_the_record_with_the_later_clock():
    old = state(pause=PoolPause(3, "keep", 5.0), weights=FIRST)
    new = state(pause=PoolPause(4), weights=PoolWeights(2, "b", 3, False))
    for one, other in ((old, new), (new, old)):
        merged = one.merged(other)
        assert (merged.pause, merged.weights) == (new.pause, new.weights)


def test_merging_in_any_order_gives_the_same_state():
    rng = random.Random(1)
    states = [
        state(
            weights=PoolWeights(rng.randrange(3), rng.choice("ab"), 0, False),
            pause=PoolPause(number // 2, rng.choice(["keep", None]), 1.0),
            adapters=PoolAdapters(
                rng.randrange(2), {rng.choice("xy"): AdapterRecord(number, "/f")}
            ),
        )
        for number in range(4)
    ]
    results = set()
    for order in itertools.permutations(states):
        known = PoolState()
        for received in order:
            known = known.merged(received)
        results.add(msgspec.json.encode(known))
    assert len(results) == 1


def test_state_of_another_model_is_ignored():
    local = state()
    assert local.merged(PoolState(model="other", weights=FIRST)) is local
    assert local.merged(PoolState()) is local


def test_merging_equal_state_returns_the_same_object():
    local = state(weights=FIRST)
    assert local.merged(state(weights=FIRST)) is local


def test_empty_state_is_encoded_in_few_bytes():
    assert len(msgspec.msgpack.encode(PoolState(model="m"))) < 20


def test_a_worker_keeps_state_that_arrives_before_its_model_is_loaded():
    made = PoolCopy(Ledger("", "0"), lambda: None)
    made.merge(state(weights=FIRST))
    made.start("m")
    assert made.weights == FIRST
    other = PoolCopy(Ledger("", "0"), lambda: None)
    other.merge(state(weights=FIRST))
    other.start("another model")
    assert other.weights == PoolWeights()


def test_only_new_state_triggers_the_callback():
    made, changes = view()
    made.merge(state(weights=FIRST))
    made.merge(state(weights=FIRST))
    assert changes == ["news"]


def test_the_lease_of_a_pause_counts_down_after_a_merge(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("workers.weights.pool_copy.time", SimpleNamespace(monotonic=lambda: now))
    made, _ = view()
    made.merge(state(pause=PoolPause(1, "keep", 3.0)))
    now += 1
    assert made.pause == PoolPause(1, "keep", 2.0)
    now += 2
    assert made.pause == PoolPause(1, None, 0.0)


def test_each_change_gets_a_later_clock_than_all_known_ones():
    made, _ = view()
    made.merge(state(pause=PoolPause(5, "keep", 9.0)))
    made.record_pause(None, 0.0, clock=2)
    assert made.pause.clock == 6
    made.merge(state(adapters=PoolAdapters(8, {})))
    made.record_adapter("a", AdapterRecord(1, "/f"), 9)
    made.record_adapter("b", AdapterRecord(1, "/g"), 0)
    made.record_adapter("a", None, 0)
    assert (made.adapters.clock, list(made.adapters.by_name)) == (11, ["b"])


def test_changes_after_a_loss_of_state_win_over_the_old_state():
    # A front end that reached no worker still has the old state.
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


def test_an_expired_lease_does_not_pause_a_worker_that_starts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0
    monkeypatch.setattr("workers.ledger.time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr("workers.weights.pool_copy.time", SimpleNamespace(monotonic=lambda: now))
    made, _ = view(str(tmp_path))
    made.record_pause("keep", 10.0, 1)
    loading = PoolCopy(Ledger("", "0"), lambda: None)
    loading.merge(made.state)
    now += 4
    soon, _ = view(str(tmp_path))
    assert soon.pause == PoolPause(made.pause.clock, "keep", 6.0)
    now += 7
    late, _ = view(str(tmp_path))
    # The same holds for a worker that was loading when the lease expired.
    loading.start("m")
    for one in (late, loading):
        assert one.pause == PoolPause(made.pause.clock, None, 0.0)


def test_a_restarted_process_reads_the_ledger(tmp_path: Path):
    made, _ = view(str(tmp_path))
    made.record_weights(FIRST)
    made.record_adapter("a", AdapterRecord(1, "/f", "x"), 1)
    after, _ = view(str(tmp_path))
    assert after.weights == FIRST
    assert after.adapters == made.adapters
    # Another worker, or another model, starts without it.
    assert PoolCopy(Ledger(str(tmp_path), "1"), lambda: None).weights == PoolWeights()
    assert view(str(tmp_path), model="other")[0].weights == PoolWeights()


def test_a_ledger_that_cannot_be_written_or_read_is_logged_only(tmp_path: Path, caplog):
    made, _ = view(str(tmp_path / "nowhere"))
    made.record_weights(FIRST)
    made.record_adapter("a", AdapterRecord(1, "/f"), 1)
    assert made.weights == FIRST
    assert "could not be written" in caplog.text
    for torn in (b"{half", b'{"model": "\xff"}'):
        (tmp_path / "worker-state-0").write_bytes(torn)
        assert Ledger(str(tmp_path), "0").read() == PoolState()
    assert "cannot be read" in caplog.text


def test_workers_with_dotted_names_have_separate_ledgers(tmp_path: Path):
    for name in ("n1.lan", "n1.wan"):
        Ledger(str(tmp_path), name).write(state(weights=PoolWeights(1, name)))
    for name in ("n1.lan", "n1.wan"):
        assert Ledger(str(tmp_path), name).read().weights.update_id == name
