"""What handlers tell the workers beside jobs, and the workers' answers.

Runs in: each front-end process; handlers wait in their own greenlets, the link brings answers.
Nothing of an update is kept here, so that its calls may come to any front end.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.event import AsyncResult

from app.pool import Pool, Worker
from titopool.commands import Action, AwaitStep, Command, CommandDone
from titopool.errors import (
    ERRORS_BY_CODE,
    DeadlinePassed,
    NoReadyWorker,
    TitopoolError,
    WeightUpdateFailed,
)

Result = dict[str, Any]
# What is answered when it is accepted takes no longer than a step of the engine and a check.
ACCEPT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Waiting:
    """A command that a worker has not answered."""

    endpoint: str
    answer: "AsyncResult[Result]"


class Commands:
    """Sends actions to workers and waits for what comes of them."""

    def __init__(self, send: Callable[[str, Command], None], pool: Pool):
        self._send = send
        self._pool = pool
        self._ids = itertools.count(1)
        self._waiting: dict[int, Waiting] = {}

    # ---- for handlers ----------------------------------------------------------------

    def members(self) -> list[Worker]:
        """All workers in the order that every front end has: that of their endpoints.

        Raises:
            NoReadyWorker: one is not there; a weight update would miss it.
        """
        workers = sorted(self._pool.workers.values(), key=lambda one: natural(one.endpoint))
        for worker in workers:
            if worker.heartbeat is None:
                raise NoReadyWorker(
                    f"the worker at {worker.endpoint} does not answer, and this call needs every "
                    "worker; ask /ready and try again",
                    retry_after_s=2,
                )
        if not workers:
            raise NoReadyWorker("no worker is known yet; ask /ready and try again", retry_after_s=2)
        return workers

    @property
    def num_updates(self) -> int:
        """The greatest number of updates that any worker has had."""
        return self._pool.num_updates

    def in_turn(
        self,
        workers: Sequence[Worker],
        action_for: Callable[[int, Result], Action],
        *,
        undo: Action | None = None,
    ) -> list[Result]:
        """Sends an action to the first worker and, when that has accepted it, to the others.

        Args:
            action_for: makes the action for worker `index`; gets the first one's answer, empty
                for the first itself.
            undo: what all are told when the first has accepted and another fails.

        Raises:
            TitopoolError: the first refused, or another failed.
        """
        first = self.start(workers[0], action_for(0, {}))
        results = [self._result(first, ACCEPT_TIMEOUT_S)]
        try:
            others = [
                self.start(worker, action_for(index, results[0]))
                for index, worker in enumerate(workers[1:], start=1)
            ]
            return results + self._results(others, ACCEPT_TIMEOUT_S)
        except TitopoolError:
            if undo is not None:
                self.tell_all(workers, undo)
            raise

    def tell_all(self, workers: Sequence[Worker], action: Action) -> None:
        """Tells all workers that are left; those that know nothing of it say so to nobody."""
        for worker in workers:
            try:
                self.at_once([worker], action)
            except TitopoolError:
                continue

    def at_once(
        self, workers: Sequence[Worker], action: Action, *, timeout_s: float = ACCEPT_TIMEOUT_S
    ) -> list[Result]:
        """Sends an action to all workers.

        Raises:
            TitopoolError: the first error of any; all have answered.
        """
        return self._results([self.start(worker, action) for worker in workers], timeout_s)

    def await_step(
        self, workers: Sequence[Worker], step: Any, of: str, *, timeout_s: float
    ) -> list[Result]:
        """What came of a step at each worker, after at most about `timeout_s`."""
        # The workers hold the deadline; this one is for those that answer no more.
        return self.at_once(workers, AwaitStep(step, of), timeout_s=timeout_s + 10)

    def start(self, worker: Worker, action: Action) -> int:
        """Sends an action; returns its command id."""
        command_id = next(self._ids)
        if worker.heartbeat is None:
            raise lost(worker.endpoint, "it does not answer")
        self._waiting[command_id] = Waiting(worker.endpoint, AsyncResult())
        self._send(worker.endpoint, Command(worker.heartbeat.incarnation, command_id, action))
        return command_id

    def _results(self, command_ids: Sequence[int], timeout_s: float) -> list[Result]:
        results, errors = [], []
        for command_id in command_ids:
            try:
                results.append(self._result(command_id, timeout_s))
            except TitopoolError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _result(self, command_id: int, timeout_s: float) -> Result:
        waiting = self._waiting[command_id]
        try:
            result: Result = waiting.answer.get(timeout=timeout_s)
        except gevent.Timeout:
            raise DeadlinePassed(
                f"the worker at {waiting.endpoint} did not answer within {timeout_s:g} s"
            ) from None
        finally:
            self._waiting.pop(command_id, None)
        return result

    # ---- for the link ----------------------------------------------------------------

    def on_done(self, endpoint: str, message: CommandDone) -> None:
        """Wakes the handler that waits, if it still does."""
        waiting = self._waiting.get(message.command_id)
        if waiting is None or waiting.endpoint != endpoint:
            return
        if message.code:
            error_type = ERRORS_BY_CODE.get(message.code, WeightUpdateFailed)
            waiting.answer.set_exception(error_type(message.message))
        else:
            waiting.answer.set(message.result)

    def on_lost(self, endpoint: str, reason: str) -> None:
        """Fails what the worker cannot answer any more."""
        for waiting in self._waiting.values():
            if waiting.endpoint == endpoint and not waiting.answer.ready():
                waiting.answer.set_exception(lost(endpoint, reason))


def lost(endpoint: str, reason: str) -> WeightUpdateFailed:
    """What handlers hear of a worker that is gone."""
    return WeightUpdateFailed(
        f"the worker at {endpoint} is lost: {reason}; it starts again and needs a complete update"
    )


def natural(text: str) -> list[Any]:
    """A key that puts worker-2 before worker-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
