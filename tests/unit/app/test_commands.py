"""Commands to the workers: which workers receive them, and how long the sender waits."""

import time
from collections.abc import Callable

import gevent
import pytest
from flask import Flask

from app.pool.command_sender import results_of
from app.pool.state import Pool
from app.weights import updates
from harness.servers import STALL_S
from tests.kit.workers.pools import FakePool, beat
from titopool.answers.weights import Committed
from titopool.errors import DeadlinePassed, NoReadyWorker, TitopoolError, WeightUpdateFailed
from titopool.wire.commands import (
    AbortUpdate,
    AnnounceTensors,
    ApplyUpdate,
    AwaitStep,
    Command,
    CommandDone,
    GetStatus,
)


def always_answer(fake: FakePool, index: int, command: Command) -> None:
    fake.answer(index, command)


def never_answer(fake: FakePool, index: int, command: Command) -> None:
    return None


def test_a_command_reaches_all_workers_and_reports_the_one_that_dies():
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        if index == 0:
            fake.pool.mark_worker_lost("w0", "killed")
        else:
            fake.answer(index, command)

    fake = FakePool(3, on_command)
    outcomes = fake.commands.gather_outcomes(fake.commands.all_workers(), ApplyUpdate("u"))
    assert [endpoint for endpoint, _ in fake.sent] == ["w0", "w1", "w2"]
    assert [one.result for one in outcomes] == [None, {"w": 1}, {"w": 2}]
    assert isinstance(outcomes[0].error, WeightUpdateFailed)
    assert "killed" in outcomes[0].error.message


def test_a_lost_worker_does_not_keep_a_command_from_the_others():
    fake = FakePool(3, always_answer)
    workers = fake.commands.all_workers()
    fake.pool.mark_worker_lost("w1", "killed")
    outcomes = fake.commands.gather_outcomes(workers, GetStatus())
    assert [one.result for one in outcomes] == [{"w": 0}, None, {"w": 2}]
    assert fake.commands.num_pending == 0


def test_one_timeout_covers_the_commands_to_all_workers():
    # One after the other they would take longer than a machine stands still.
    num_workers = 2 * int(STALL_S)
    fake = FakePool(num_workers, never_answer)
    begin = time.monotonic()
    outcomes = fake.commands.gather_outcomes(fake.commands.all_workers(), GetStatus(), timeout_s=1)
    assert 1 <= time.monotonic() - begin < 1 + STALL_S
    assert [one.error.code for one in outcomes if one.error] == ["deadline_passed"] * num_workers
    assert fake.commands.num_pending == 0


@pytest.mark.parametrize(
    "lose",
    [
        lambda pool: pool.remove_worker("w0"),
        lambda pool: pool.on_heartbeat("w0", beat("w0", incarnation="second"), 1),
        lambda pool: pool.mark_worker_lost("w0", "silent"),
    ],
    ids=["address-gone", "restarted", "silent"],
)
def test_waiting_ends_when_the_worker_is_lost(lose: Callable[[Pool], None]):
    fake = FakePool(1, never_answer)
    workers = fake.commands.all_workers()
    gevent.spawn_later(0.05, lose, fake.pool)
    begin = time.monotonic()
    with pytest.raises(WeightUpdateFailed):
        results_of(fake.commands.gather_outcomes(workers, GetStatus(), timeout_s=30))
    assert time.monotonic() - begin < 15


def test_a_step_that_fails_at_one_worker_is_undone_at_once_at_those_that_wait():
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        if not isinstance(command.action, AwaitStep) or index == 0:
            fake.answer(index, command)
        elif index == 2:
            gevent.spawn_later(0.05, fake.pool.mark_worker_lost, "w2", "killed")

    fake = FakePool(3, on_command)
    workers, undo = fake.commands.all_workers(), AbortUpdate("u", "staged")
    begin = time.monotonic()
    with pytest.raises(WeightUpdateFailed, match="the worker at w2 is lost: killed"):
        fake.commands.finish_step(workers, "receive", "u", undo=undo, timeout_s=30)
    assert time.monotonic() - begin < 15
    assert [endpoint for endpoint, action in fake.sent if action == undo] == ["w0", "w1"]
    assert fake.commands.num_pending == 0


def test_a_step_has_the_results_of_all_workers_or_a_deadline():
    fake = FakePool(2, always_answer)
    workers, undo = fake.commands.all_workers(), AbortUpdate("u", "staged")
    results = fake.commands.finish_step(workers, "receive", "u", undo=undo, timeout_s=30)
    assert results == [{"w": 0}, {"w": 1}]
    fake._on_command = never_answer
    outcomes = fake.commands.gather_outcomes(
        workers, GetStatus(), timeout_s=0.2, stops_at_failure=True
    )
    assert [one.error.code for one in outcomes if one.error] == ["deadline_passed"] * 2


def test_a_refusal_of_the_first_worker_stops_a_command():
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        refusal = CommandDone(command.command_id, {}, "conflict", "another trainer's")
        gevent.spawn(fake.commands.on_done, f"w{index}", refusal)

    fake = FakePool(3, on_command)
    with pytest.raises(TitopoolError, match="another trainer's"):
        fake.commands.send_first_then_others(fake.commands.all_workers(), GetStatus())
    assert [endpoint for endpoint, _ in fake.sent] == ["w0"]


def test_a_refusal_of_another_worker_is_undone_at_all_workers():
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        code = "conflict" if index == 1 and isinstance(command.action, GetStatus) else ""
        done = CommandDone(command.command_id, {}, code, "no")
        gevent.spawn(fake.commands.on_done, f"w{index}", done)

    fake = FakePool(3, on_command)
    with pytest.raises(TitopoolError, match="no"):
        fake.commands.send_first_then_others(
            fake.commands.all_workers(), GetStatus(), undo=ApplyUpdate("undo")
        )
    undone = [endpoint for endpoint, action in fake.sent if isinstance(action, ApplyUpdate)]
    assert undone == ["w0", "w1", "w2"]


def test_the_first_worker_s_answer_is_a_part_of_what_the_others_get():
    announced = {"update_id": "u", "version": 7, "clock": 3, "staging": "beside"}

    def on_command(fake: FakePool, index: int, command: Command) -> None:
        is_refused = index and isinstance(command.action, AnnounceTensors)
        code = "weight_update_failed" if is_refused else ""
        done = CommandDone(command.command_id, announced, code, "staged")
        gevent.spawn(fake.commands.on_done, f"w{index}", done)

    fake = FakePool(2, on_command)
    action, undo = AnnounceTensors("lists", "u2", clock=1), AbortUpdate(None, "staged", "lists")
    with pytest.raises(WeightUpdateFailed, match="staged"):
        fake.commands.send_first_then_others(fake.commands.all_workers(), action, undo=undo)
    undone = AbortUpdate("u", "staged", "lists")
    assert fake.sent == [
        ("w0", action), ("w1", AnnounceTensors("lists", "u", 7, 3)), ("w0", undone), ("w1", undone),
    ]  # fmt: skip


@pytest.mark.parametrize("code, is_undone", [("invalid_request", True), ("conflict", False)])
def test_what_a_refusal_of_the_first_worker_ends_is_undone_everywhere(code: str, is_undone: bool):
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        done = CommandDone(command.command_id, {}, code, "staged")
        gevent.spawn(fake.commands.on_done, f"w{index}", done)

    fake = FakePool(2, on_command)
    action, undo = AnnounceTensors("lists", list_id="l"), AbortUpdate(None, "staged", "lists")
    with pytest.raises(TitopoolError, match="staged"):
        fake.commands.send_first_then_others(
            fake.commands.all_workers(), action, undo=undo, undoes_refusal=True
        )
    assert fake.sent == [("w0", action)] + [("w0", undo), ("w1", undo)] * is_undone


def test_all_workers_raises_if_one_is_lost_and_reachable_workers_if_all_are():
    fake = FakePool(2, always_answer)
    fake.pool.mark_worker_lost("w1", "killed")
    with pytest.raises(NoReadyWorker, match="w1 does not answer"):
        fake.commands.all_workers()
    assert [one.endpoint for one in fake.commands.reachable_workers()] == ["w0"]
    fake.pool.mark_worker_lost("w0", "killed")
    with pytest.raises(NoReadyWorker, match="no worker answers"):
        fake.commands.reachable_workers()


def test_a_commit_that_was_applied_succeeds_though_all_workers_are_lost_then(
    monkeypatch: pytest.MonkeyPatch,
):
    fake = FakePool(1, always_answer)
    fake.pool.mark_worker_lost("w0", "killed")
    monkeypatch.setattr(updates, "group_workers", lambda of: (fake.commands, []))
    done = Committed(
        version=1, previous_version=0, loaded=1, staging="device", cache="clear", update_s=0.0,
        paused_s=0.0, prepare_s=0.0, apply_s=0.0, lost=[],
    )  # fmt: skip
    monkeypatch.setattr(updates, "commit_update", lambda *_: done)
    with Flask(__name__).test_request_context(data='{"update": "u", "policy": "keep"}'):
        answer = updates.commit().json
        assert (answer["version"], answer["outside"]) == (1, [])


def test_a_command_that_times_out_at_the_first_worker_is_undone_there():
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        if isinstance(command.action, ApplyUpdate):
            fake.answer(index, command)

    fake = FakePool(2, on_command)
    with pytest.raises(DeadlinePassed):
        fake.commands.send_first_then_others(
            fake.commands.all_workers(), GetStatus(),
            undo=ApplyUpdate("undo"), timeout_s=0.1,
        )  # fmt: skip
    assert fake.sent == [("w0", GetStatus()), ("w0", ApplyUpdate("undo"))]


def test_a_command_that_cannot_be_sent_is_not_pending():
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        raise OverflowError("no such number in MessagePack")

    fake = FakePool(1, on_command)
    with pytest.raises(OverflowError):
        fake.commands.gather_outcomes(fake.commands.all_workers(), GetStatus())
    assert fake.commands.num_pending == 0


def test_outcomes_distinguish_unreachable_workers_from_failed_ones():
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        codes = ["weight_update_failed", "no_ready_worker"]
        if index == 2:
            fake.pool.mark_worker_lost("w2", "killed")
            return
        done = CommandDone(command.command_id, {}, codes[index], "no")
        gevent.spawn(fake.commands.on_done, f"w{index}", done)

    fake = FakePool(4, on_command)
    workers = fake.commands.all_workers()
    fake.pool.mark_worker_lost("w3", "killed")
    outcomes = fake.commands.gather_outcomes(workers, GetStatus())
    assert [one.was_unreachable for one in outcomes] == [False, True, True, True]
