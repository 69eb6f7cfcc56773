"""What handlers tell the workers apart from jobs, and the workers' answers.

Runs in: each front-end process; handlers wait in their own greenlets, the link brings answers.
Nothing of an update is kept here, so that its calls may come to any front end.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gevent
from gevent.event import AsyncResult, Event

from app.pool.records import Worker
from app.pool.state import Pool
from titopool.errors import (
    ERRORS_BY_CODE,
    DeadlinePassed,
    NoReadyWorker,
    TitopoolError,
    WeightUpdateFailed,
)
from titopool.wire.commands import Action, AwaitStep, Command, CommandDone

Result = dict[str, Any]
# What is answered when it is accepted takes no longer than a step of the engine and a check.
ACCEPT_TIMEOUT_S = 60.0
# By this much later than the workers, who hold the deadlines of steps, a front end gives up.
STEP_MARGIN_S = 10.0


class Outcome(NamedTuple):
    """What came of an action at one worker: either a result or an error."""

    endpoint: str
    result: Result | None = None
    error: TitopoolError | None = None
    # Whether the error is that the worker was not there: lost, or still loading.
    was_unreachable: bool = False


class Waiting(NamedTuple):
    """A command that a worker has not answered."""

    command_id: int
    endpoint: str
    answer: "AsyncResult[Result]"
    # Set when the worker cannot answer any more.
    is_lost: Event

    def lose(self, reason: str) -> None:
        """The worker cannot answer any more; does nothing if it has."""
        if not self.answer.ready():
            self.is_lost.set()
            self.answer.set_exception(lost(self.endpoint, reason))


class CommandSender:
    """Sends actions to workers and waits for what comes of them."""

    def __init__(self, send: Callable[[str, Command], None], pool: Pool):
        self._send = send
        self._pool = pool
        self._ids = itertools.count(1)
        self._waiting: dict[int, Waiting] = {}

    # ---- for handlers ----------------------------------------------------------------

    def all_workers(self) -> list[Worker]:
        """All workers in the order that every front end has: that of their endpoints.

        Raises:
            NoReadyWorker: one is not there, or serves another model; a weight update would miss it.
        """
        workers = self._pool.in_order()
        for worker in workers:
            if worker.heartbeat is None or worker.phase == "mismatched":
                what = "does not answer" if worker.heartbeat is None else "serves another model"
                raise NoReadyWorker(
                    f"the worker at {worker.endpoint} {what}, and this call needs every worker; "
                    "ask /ready and try again",
                    retry_after_s=2,
                )
        if not workers:
            raise NoReadyWorker("no worker is known yet; ask /ready and try again", retry_after_s=2)
        return workers

    def reachable_workers(self) -> list[Worker]:
        """The workers that answer, in the same order; the others hear of a change when they can
        be reached again.

        Raises:
            NoReadyWorker: none does.
        """
        found = [
            one for one in self._pool.in_order() if one.heartbeat and one.phase != "mismatched"
        ]
        if not found:
            raise NoReadyWorker("no worker answers; ask /ready and try again", retry_after_s=2)
        return found

    @property
    def weights_clock(self) -> int:
        """Logical clock of the pool's weights."""
        return self._pool.weights_clock

    @property
    def pause_clock(self) -> int:
        """Logical clock of the pool's pause."""
        return self._pool.pause_clock

    @property
    def adapters_clock(self) -> int:
        """Logical clock of the pool's adapters."""
        return self._pool.adapters_clock

    def send_first_then_others(
        self,
        workers: Sequence[Worker],
        action_for: Callable[[int, Result], Action],
        *,
        undo: Action | None = None,
        timeout_s: float = ACCEPT_TIMEOUT_S,
    ) -> list[Result]:
        """Sends an action to the first worker and, when that has accepted it, to the others.

        Of two trainers that call at once, through any front ends, one is refused there.

        Args:
            action_for: makes the action for worker `index`; gets the first one's answer, empty
                for the first itself.
            undo: what all are told when the first has accepted and another fails.

        Raises:
            TitopoolError: the first refused, or another failed.
        """
        try:
            (first,) = self.gather_results(
                workers[:1], lambda _: action_for(0, {}), timeout_s=timeout_s
            )
        except DeadlinePassed:
            # It may accept all the same, later.
            if undo is not None:
                self.gather_outcomes(workers[:1], undo)
            raise
        try:
            others = self.gather_results(
                workers[1:], lambda index: action_for(index + 1, first), timeout_s=timeout_s
            )
        except TitopoolError:
            if undo is not None:
                self.gather_outcomes(workers, undo)
            raise
        return [first, *others]

    def gather_results(
        self,
        workers: Sequence[Worker],
        action: Action | Callable[[int], Action],
        *,
        timeout_s: float = ACCEPT_TIMEOUT_S,
    ) -> list[Result]:
        """Sends an action to all workers.

        Raises:
            TitopoolError: the first error of any; all have answered.
        """
        outcomes = self.gather_outcomes(workers, action, timeout_s=timeout_s)
        for one in outcomes:
            if one.error is not None:
                raise one.error
        return [one.result for one in outcomes if one.result is not None]

    def gather_outcomes(
        self,
        workers: Sequence[Worker],
        action: Action | Callable[[int], Action],
        *,
        timeout_s: float = ACCEPT_TIMEOUT_S,
    ) -> list[Outcome]:
        """Sends an action to all workers; what came of it at each, within `timeout_s` in all.

        Args:
            action: the same for all, or what makes that of worker `index`.
        """
        deadline = time.monotonic() + timeout_s
        sent: list[Waiting] = []
        try:
            for index, worker in enumerate(workers):
                sent.append(self._start(worker, action(index) if callable(action) else action))
            return [self._outcome(one, deadline, timeout_s) for one in sent]
        finally:
            for one in sent:
                self._waiting.pop(one.command_id, None)

    def await_step(
        self, workers: Sequence[Worker], step: Any, of: str, *, timeout_s: float
    ) -> list[Outcome]:
        """What came of a step at each worker, which holds the deadline `timeout_s`."""
        return self.gather_outcomes(
            workers, AwaitStep(step, of), timeout_s=timeout_s + STEP_MARGIN_S
        )

    def _start(self, worker: Worker, action: Action) -> Waiting:
        """Sends an action, or notes why it cannot be sent."""
        waiting = Waiting(next(self._ids), worker.endpoint, AsyncResult(), Event())
        if worker.heartbeat is None:
            waiting.lose("it does not answer")
            return waiting
        incarnation = worker.heartbeat.incarnation
        self._waiting[waiting.command_id] = waiting
        try:
            self._send(worker.endpoint, Command(incarnation, waiting.command_id, action))
        except BaseException:
            del self._waiting[waiting.command_id]
            raise
        return waiting

    def _outcome(self, waiting: Waiting, deadline: float, timeout_s: float) -> Outcome:
        endpoint = waiting.endpoint
        try:
            result = waiting.answer.get(timeout=max(0.0, deadline - time.monotonic()))
            return Outcome(endpoint, result)
        except gevent.Timeout:
            text = f"the worker at {endpoint} did not answer within {timeout_s:g} s"
            return Outcome(endpoint, error=DeadlinePassed(text))
        except TitopoolError as error:
            was_unreachable = waiting.is_lost.is_set() or isinstance(error, NoReadyWorker)
            return Outcome(endpoint, error=error, was_unreachable=was_unreachable)

    # ---- for the link ----------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """CommandSender that no worker has answered."""
        return len(self._waiting)

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

    def on_worker_lost(self, endpoint: str, reason: str) -> None:
        """Fails what the worker cannot answer any more."""
        for waiting in self._waiting.values():
            if waiting.endpoint == endpoint:
                waiting.lose(reason)


def lost(endpoint: str, reason: str) -> WeightUpdateFailed:
    """What handlers hear of a worker that is gone."""
    return WeightUpdateFailed(
        f"the worker at {endpoint} is lost: {reason}; it starts again and needs a complete update"
    )
