"""The state machine of a worker's weights: the allowed transitions, and no others."""

import random

import pytest

from titopool.errors import Conflict
from titopool.wire.pool_state import PoolWeights
from workers.weights.state import Phase, WeightState

TIMEOUT_S = 10.0


def update(name: str = "u", version: int = 1, index: int = 1, folder: str = "") -> PoolWeights:
    return PoolWeights(index, name, version, False, folder)


def opened(session: str = "s") -> WeightState:
    state = WeightState(timeout_s=TIMEOUT_S)
    state.join(session, 0.0)
    state.joined(session, 0.0)
    return state


def test_an_update_passes_all_phases():
    state = opened()
    state.begin("s", update(version=7), 1.0)
    state.prepare("u", 2.0)
    state.prepared("u", 3.0)
    state.apply("u", 4.0)
    assert state.weights.version == 0
    state.applied("u", 5.0)
    assert (state.phase, state.weights.version, state.weights.clock) == (Phase.OPEN, 7, 1)


def test_a_folder_update_needs_no_group_and_keeps_an_open_one():
    for state in (WeightState(timeout_s=TIMEOUT_S), opened()):
        before = state.phase
        state.begin_apart("update_weights", update(folder="/w"), 0.0)
        state.abort("u", "why not")
        assert state.phase is before
        state.begin_apart("update_weights", update(folder="/w"), 0.0)
        state.prepare("u", 0.0)
        state.prepared("u", 0.0)
        state.apply("u", 0.0)
        state.applied("u", 0.0)
        assert (state.phase, state.weights.version) == (before, 1)


def test_folder_updates_do_not_keep_an_idle_session_alive():
    state = opened()
    for now in (50.0, 100.0):
        state.begin_apart("update_weights", update(folder="/w"), now)
        state.prepare("u", now)
        state.prepared("u", now)
        state.apply("u", now)
        state.applied("u", now)
        assert state.idle_s(now) == now
    state.begin("s", update("v"), 110.0)
    assert state.idle_s(111.0) == 1.0


def test_every_step_has_a_deadline_and_open_phases_have_none():
    state = opened()
    assert not state.has_expired(1e9)
    state.begin("s", update(), 100.0)
    assert not state.has_expired(100.0 + TIMEOUT_S)
    assert state.has_expired(100.1 + TIMEOUT_S)
    state.prepare("u", 105.0)
    assert not state.has_expired(100.1 + TIMEOUT_S)
    assert state.has_expired(105.1 + TIMEOUT_S)
    # It waits until the others are prepared, each within its own timeout.
    state.prepared("u", 110.0)
    assert not state.has_expired(110.0 + 2 * TIMEOUT_S)
    assert state.has_expired(110.1 + 2 * TIMEOUT_S)


def test_the_refusal_of_a_second_trainer_names_the_state():
    state = opened("first")
    with pytest.raises(
        Conflict, match="no other trainer's session; the state is open, session first"
    ):
        state.join("second", 0.0)
    with pytest.raises(Conflict, match="session second"):
        state.begin("second", update(), 0.0)
    state.join("second", 0.0, takes_over=True)
    assert (state.phase, state.session) == (Phase.JOINING, "second")


def test_no_trainer_takes_over_while_weights_are_applied():
    state = opened()
    state.begin("s", update(), 0.0)
    state.prepare("u", 0.0)
    for step in (state.prepared, state.apply):
        step("u", 0.0)
    with pytest.raises(Conflict):
        state.join("other", 0.0, takes_over=True)
    with pytest.raises(Conflict):
        state.end("why not")
    with pytest.raises(Conflict):
        state.abort("u", "why not")


# Steps of a commit, and steps that may not stand between them.
COMMIT = ("prepare", "prepared", "apply", "applied", "drop", "end")


def steps_of(state: WeightState, now: float, name: str, session: str, weights: PoolWeights):
    """Every call of the state machine, for one session and one update."""
    folder = update(name, weights.version, weights.clock, "/w")
    return {
        "join": lambda: state.join(session, now),
        "take over": lambda: state.join(session, now, takes_over=True),
        "joined": lambda: state.joined(session, now),
        "leave": lambda: state.leave(session),
        "end": lambda: state.end("because"),
        "begin": lambda: state.begin(session, weights, now),
        "folder": lambda: state.begin_apart("update_weights", folder, now),
        "touch": lambda: state.touch(now),
        "prepare": lambda: state.prepare(name, now),
        "prepared": lambda: state.prepared(name, now),
        "apply": lambda: state.apply(name, now),
        "applied": lambda: state.applied(name, now),
        "drop": lambda: state.abort(name, "because"),
    }


def snapshot(state: WeightState) -> tuple[object, ...]:
    return state.phase, state.session, state.update, state.weights


@pytest.mark.parametrize("seed", range(200))
def test_random_orders_change_the_version_only_by_a_complete_update(seed: int):
    rng = random.Random(seed)
    state, now = WeightState(timeout_s=TIMEOUT_S), 0.0
    done: list[tuple[str, str]] = []
    for _ in range(300):
        now += rng.random()
        name, session = rng.choice("ab"), rng.choice("ab")
        weights = update(name, rng.randrange(100), state.weights.clock + 1)
        steps = steps_of(state, now, name, session, weights)
        step, before = rng.choice(list(steps)), snapshot(state)
        refusal = ""
        try:
            steps[step]()
        except Conflict as error:
            refusal = error.message
        if refusal:
            assert snapshot(state) == before, "a refused call has changed something"
            assert f"the state is {state.phase}" in refusal
            continue
        done.append((step, name))
        if snapshot(state)[3:] != before[3:]:
            assert step == "applied"
            commit_steps = [one for one, _ in done if one in COMMIT]
            assert commit_steps[-4:] == ["prepare", "prepared", "apply", "applied"]
        is_resting = state.phase in (Phase.CLOSED, Phase.OPEN)
        assert (state.update is None) == (is_resting or state.phase is Phase.JOINING)
        assert (state.deadline is None) == is_resting
        has_folder = state.update is not None and state.update.folder
        assert state.session or state.phase is Phase.CLOSED or has_folder


def test_random_orders_reach_every_phase_and_a_commit():
    rng = random.Random(1)
    state, phases = WeightState(timeout_s=TIMEOUT_S), set()
    for now in range(20_000):
        steps = steps_of(state, now, rng.choice("ab"), rng.choice("ab"), update(rng.choice("ab")))
        try:
            steps[rng.choice(list(steps))]()
        except Conflict:
            continue
        phases.add(state.phase)
    assert phases == set(Phase)
    assert state.weights.clock == 1
