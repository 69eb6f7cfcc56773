"""What handlers tell the workers apart from jobs: who is told, and how long they wait."""

import time
from collections.abc import Callable

import gevent
import pytest

from app.pool.command_sender import CommandSender, results_of
from app.pool.state import Pool
from tests.test_pool import beat
from titopool.errors import DeadlinePassed, NoReadyWorker, TitopoolError, WeightUpdateFailed
from titopool.wire.commands import Action, ApplyUpdate, Command, CommandDone, GetStatus


class Told:
    """A pool of workers that answer as `answers` says, and what they were sent."""

    def __init__(self, num_workers: int, answers: Callable[["Told", int, Command], None]):
        self.sent: list[tuple[str, Action]] = []
        self._answers = answers
        self.pool = Pool(
            no_worker_timeout_s=1, on_lost=lambda *what: self.commands.on_worker_lost(*what)
        )
        self.commands = CommandSender(self._send, self.pool)
        for index in range(num_workers):
            self.pool.add_worker(f"w{index}", 0)
            self.pool.on_heartbeat(f"w{index}", beat(f"w{index}"), 0)

    def _send(self, endpoint: str, command: Command) -> None:
        self.sent.append((endpoint, command.action))
        self._answers(self, int(endpoint[1:]), command)

    def answer(self, index: int, command: Command) -> None:
        gevent.spawn(
            self.commands.on_done, f"w{index}", CommandDone(command.command_id, {"w": index})
        )


def all_answer(told: Told, index: int, command: Command) -> None:
    told.answer(index, command)


def none_answers(told: Told, index: int, command: Command) -> None:
    return None


def test_all_are_told_and_each_end_is_known_when_one_dies():
    def answers(told: Told, index: int, command: Command) -> None:
        if index == 0:
            told.pool.mark_worker_lost("w0", "killed")
        else:
            told.answer(index, command)

    told = Told(3, answers)
    outcomes = told.commands.gather_outcomes(told.commands.all_workers(), ApplyUpdate("u"))
    assert [endpoint for endpoint, _ in told.sent] == ["w0", "w1", "w2"]
    assert [one.result for one in outcomes] == [None, {"w": 1}, {"w": 2}]
    assert isinstance(outcomes[0].error, WeightUpdateFailed)
    assert "killed" in outcomes[0].error.message


def test_one_that_is_gone_already_does_not_keep_the_others_from_being_told():
    told = Told(3, all_answer)
    workers = told.commands.all_workers()
    told.pool.mark_worker_lost("w1", "killed")
    outcomes = told.commands.gather_outcomes(workers, GetStatus())
    assert [one.result for one in outcomes] == [{"w": 0}, None, {"w": 2}]
    assert told.commands.num_pending == 0


def test_the_time_out_is_that_of_all_commands_together():
    told = Told(4, none_answers)
    begin = time.monotonic()
    outcomes = told.commands.gather_outcomes(
        told.commands.all_workers(), GetStatus(), timeout_s=0.3
    )
    assert 0.3 <= time.monotonic() - begin < 1.0
    assert [one.error.code for one in outcomes if one.error] == ["deadline_passed"] * 4
    assert told.commands.num_pending == 0


@pytest.mark.parametrize(
    "lose",
    [
        lambda pool: pool.remove_worker("w0"),
        lambda pool: pool.on_heartbeat("w0", beat("w0", incarnation="second"), 1),
        lambda pool: pool.mark_worker_lost("w0", "silent"),
    ],
    ids=["address-gone", "restarted", "silent"],
)
def test_a_worker_that_is_known_to_be_gone_is_not_waited_for(lose: Callable[[Pool], None]):
    told = Told(1, none_answers)
    workers = told.commands.all_workers()
    gevent.spawn_later(0.05, lose, told.pool)
    begin = time.monotonic()
    with pytest.raises(WeightUpdateFailed):
        results_of(told.commands.gather_outcomes(workers, GetStatus(), timeout_s=30))
    assert time.monotonic() - begin < 5


def test_the_first_decides_for_all():
    def answers(told: Told, index: int, command: Command) -> None:
        refusal = CommandDone(command.command_id, {}, "conflict", "another trainer's")
        gevent.spawn(told.commands.on_done, f"w{index}", refusal)

    told = Told(3, answers)
    with pytest.raises(TitopoolError, match="another trainer's"):
        told.commands.send_first_then_others(
            told.commands.all_workers(), lambda index, first: GetStatus()
        )
    assert [endpoint for endpoint, _ in told.sent] == ["w0"]


def test_what_the_others_refuse_is_undone_at_all():
    def answers(told: Told, index: int, command: Command) -> None:
        code = "conflict" if index == 1 and isinstance(command.action, GetStatus) else ""
        done = CommandDone(command.command_id, {}, code, "no")
        gevent.spawn(told.commands.on_done, f"w{index}", done)

    told = Told(3, answers)
    with pytest.raises(TitopoolError, match="no"):
        told.commands.send_first_then_others(
            told.commands.all_workers(), lambda index, first: GetStatus(), undo=ApplyUpdate("undo")
        )
    undone = [endpoint for endpoint, action in told.sent if isinstance(action, ApplyUpdate)]
    assert undone == ["w0", "w1", "w2"]


def test_some_calls_need_all_workers_and_some_those_that_are_there():
    told = Told(2, all_answer)
    told.pool.mark_worker_lost("w1", "killed")
    with pytest.raises(NoReadyWorker, match="w1 does not answer"):
        told.commands.all_workers()
    assert [one.endpoint for one in told.commands.reachable_workers()] == ["w0"]
    told.pool.mark_worker_lost("w0", "killed")
    with pytest.raises(NoReadyWorker, match="no worker answers"):
        told.commands.reachable_workers()


def test_what_the_first_may_accept_too_late_is_undone_there():
    def answers(told: Told, index: int, command: Command) -> None:
        if isinstance(command.action, ApplyUpdate):
            told.answer(index, command)

    told = Told(2, answers)
    with pytest.raises(DeadlinePassed):
        told.commands.send_first_then_others(
            told.commands.all_workers(), lambda index, first: GetStatus(),
            undo=ApplyUpdate("undo"), timeout_s=0.1,
        )  # fmt: skip
    assert told.sent == [("w0", GetStatus()), ("w0", ApplyUpdate("undo"))]


def test_a_command_that_cannot_be_sent_is_not_waited_for():
    def answers(told: Told, index: int, command: Command) -> None:
        raise OverflowError("no such number in MessagePack")

    told = Told(1, answers)
    with pytest.raises(OverflowError):
        told.commands.gather_outcomes(told.commands.all_workers(), GetStatus())
    assert told.commands.num_pending == 0


def test_a_worker_that_was_not_there_is_told_from_one_that_failed():
    def answers(told: Told, index: int, command: Command) -> None:
        codes = ["weight_update_failed", "no_ready_worker"]
        if index == 2:
            told.pool.mark_worker_lost("w2", "killed")
            return
        done = CommandDone(command.command_id, {}, codes[index], "no")
        gevent.spawn(told.commands.on_done, f"w{index}", done)

    told = Told(4, answers)
    workers = told.commands.all_workers()
    told.pool.mark_worker_lost("w3", "killed")
    outcomes = told.commands.gather_outcomes(workers, GetStatus())
    assert [one.was_unreachable for one in outcomes] == [False, True, True, True]
