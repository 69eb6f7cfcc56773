"""Sends commands to workers (weight updates, pauses, adapters) and gathers the outcomes.

Runs in: each gunicorn process. Handlers wait in their own greenlets; the link delivers the workers'
replies. Nothing about an update is kept here, so any front end can serve the next call.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gevent
import msgspec
from gevent.event import AsyncResult, Event

from app.pool.records import Worker
from app.pool.state import Pool
from titopool.deadline import Deadline
from titopool.errors import (
    ERRORS_BY_CODE,
    Conflict,
    DeadlinePassed,
    NoReadyWorker,
    TitopoolError,
    WeightUpdateFailed,
)
from titopool.wire.commands import Action, AwaitStep, Command, CommandDone
from titopool.wire.pool_state import PoolState

Result = dict[str, Any]
# Accepting a command takes a worker one step of the engine and a check, at most.
ACCEPT_TIMEOUT_S = 60.0
# Workers enforce the deadlines of steps; a front end waits this much longer.
STEP_MARGIN_S = 10.0


class Outcome(NamedTuple):
    """The result of an action at one worker, or the error."""

    endpoint: str
    result: Result | None = None
    error: TitopoolError | None = None
    # Whether the worker was lost or still loading, so that it did not run the action.
    was_unreachable: bool = False


class PendingCommand(NamedTuple):
    """A command that a worker has not replied to."""

    command_id: int
    endpoint: str
    reply: "AsyncResult[Result]"
    # Set if the worker is lost before it replies.
    is_lost: Event

    def mark_lost(self, reason: str) -> None:
        """Fails the command unless the worker has replied."""
        if not self.reply.ready():
            self.is_lost.set()
            self.reply.set_exception(
                WeightUpdateFailed(
                    f"the worker at {self.endpoint} is lost: {reason}; once the worker has "
                    "restarted, send it a complete update"
                )
            )


class CommandSender:
    """Sends actions to workers and waits for their outcomes."""

    def __init__(self, send: Callable[[str, Command], None], pool: Pool):
        """`send(endpoint, command)` queues a command for a worker."""
        self._send = send
        self._pool = pool
        self._ids = itertools.count(1)
        self._pending: dict[int, PendingCommand] = {}

    # ---- for handlers ----------------------------------------------------------------

    @property
    def pool_state(self) -> PoolState:
        """What this front end knows of the pool; actions carry its logical clocks."""
        return self._pool.view.state

    def all_workers(self) -> list[Worker]:
        """All workers in the order of their endpoints, which is the same in all front ends.

        Without those that join and still load: they catch up with the pool before they serve.

        Raises:
            NoReadyWorker: a worker is unreachable or serves another model, so that it would
                miss a weight update.
        """
        workers = self._settled_workers()
        for worker in workers:
            if not is_reachable(worker):
                what = "does not answer" if worker.heartbeat is None else "serves another model"
                raise NoReadyWorker(
                    f"expected every worker to answer, but the worker at {worker.endpoint} {what}; "
                    "ask /ready and try again",
                    retry_after_s=2,
                )
        if not workers:
            raise NoReadyWorker("no worker is known yet; ask /ready and try again", retry_after_s=2)
        return workers

    def whole_pool(self) -> list[Worker]:
        """As `all_workers`, for a client that must not repeat its call.

        Raises:
            Conflict: workers are unreachable, still load or serve another model; it names them.
        """
        workers = self._settled_workers()
        absent = [
            f"the worker at {one.endpoint} {why}" for one in workers if (why := why_absent(one))
        ]
        if absent or not workers:
            raise Conflict(
                "expected every worker to take part, but "
                f"{', '.join(absent) or 'no worker is known yet'}; ask /ready and call again"
            )
        return workers

    def known_workers(self) -> list[Worker]:
        """The workers that answer and serve the pool's model, in order; none may be there."""
        return list(filter(is_reachable, self._pool.sorted_workers()))

    def _settled_workers(self) -> list[Worker]:
        return [worker for worker in self._pool.sorted_workers() if not worker.is_joining]

    def reachable_workers(self) -> list[Worker]:
        """The workers that answer and serve the pool's model, in the order of their endpoints.

        The other workers learn of a change from `Hello` once they can be reached.

        Raises:
            NoReadyWorker: no worker is reachable.
        """
        workers = self.known_workers()
        if not workers:
            raise NoReadyWorker("no worker answers; ask /ready and try again", retry_after_s=2)
        return workers

    def send_first_then_others(
        self,
        workers: Sequence[Worker],
        action: Action | Callable[[int], Action],
        *,
        undo: Action | None = None,
        undoes_refusal: bool = False,
        timeout_s: float = ACCEPT_TIMEOUT_S,
    ) -> list[Result]:
        """Sends an action to the first worker and, once the first has accepted it, to the others.

        If two trainers call at once, through any front ends, the first worker refuses one. What the
        first worker answers, such as the update's version, takes the place of the fields of the same
        names in the others' action, and in `undo`.

        Args:
            action: the action, or a function that makes it for worker `index`.
            undo: sent to all workers if the first accepts the action and another worker fails.
            undoes_refusal: send `undo` also if the first worker fails: what the action belongs to
                has ended there. After a `Conflict` it has not.

        Raises:
            TitopoolError: the first worker refused, or another worker failed.
        """
        make = action if callable(action) else lambda index: action

        def undo_at(which: Sequence[Worker], first: Result) -> None:
            if undo is not None:
                self.gather_outcomes(which, _following(undo, first))

        try:
            (first,) = results_of(self.gather_outcomes(workers[:1], make(0), timeout_s=timeout_s))
        except TitopoolError as error:
            if undoes_refusal and not isinstance(error, Conflict):
                undo_at(workers, {})
            elif isinstance(error, DeadlinePassed):
                # The first worker may still accept the action later.
                undo_at(workers[:1], {})
            raise
        try:
            others = results_of(
                self.gather_outcomes(
                    workers[1:], lambda index: _following(make(index + 1), first),
                    timeout_s=timeout_s,
                )
            )  # fmt: skip
        except TitopoolError:
            undo_at(workers, first)
            raise
        return [first, *others]

    def gather_outcomes(
        self,
        workers: Sequence[Worker],
        action: Action | Callable[[int], Action],
        *,
        timeout_s: float = ACCEPT_TIMEOUT_S,
        stops_at_failure: bool = False,
    ) -> list[Outcome]:
        """Sends an action to all workers and returns each worker's outcome, in order.

        Args:
            action: the action, or a function that makes it for worker `index`.
            timeout_s: limit for all workers together; a worker without a reply by then has the
                error `DeadlinePassed`.
            stops_at_failure: return once a worker has failed, without the workers that have not
                replied by then.
        """
        deadline = Deadline.after(timeout_s)
        sent: list[PendingCommand] = []
        try:
            for index, worker in enumerate(workers):
                pending = PendingCommand(next(self._ids), worker.endpoint, AsyncResult(), Event())
                sent.append(pending)
                self._start(worker, pending, action(index) if callable(action) else action)
            replied = sent
            if stops_at_failure and _has_failure(sent, deadline):
                replied = [one for one in sent if one.reply.ready()]
            return [self._await_outcome(one, deadline, timeout_s) for one in replied]
        finally:
            for one in sent:
                self._pending.pop(one.command_id, None)

    def await_step(
        self, workers: Sequence[Worker], step: Any, of: str, *, timeout_s: float
    ) -> list[Outcome]:
        """Each worker's outcome of an accepted step; the workers enforce `timeout_s`."""
        return self.gather_outcomes(
            workers, AwaitStep(step, of), timeout_s=timeout_s + STEP_MARGIN_S
        )

    def finish_step(
        self, workers: Sequence[Worker], step: Any, of: str, *, undo: Action, timeout_s: float
    ) -> list[Result]:
        """The results of an accepted step; `undo` is sent to all workers as soon as one fails.

        The others would wait in the group for the one that has failed, or is lost.

        Raises:
            TitopoolError: the first error of any worker.
        """
        try:
            return results_of(
                self.gather_outcomes(
                    workers, AwaitStep(step, of), timeout_s=timeout_s + STEP_MARGIN_S,
                    stops_at_failure=True,
                )
            )  # fmt: skip
        except TitopoolError:
            self.gather_outcomes(workers, undo)
            raise

    def run_step(
        self,
        workers: Sequence[Worker],
        action: Action | Callable[[int], Action],
        step: Any,
        of: str,
        *,
        undo: Action,
        timeout_s: float,
    ) -> list[Result]:
        """As `send_first_then_others`, then waits until the step has ended at all workers.

        Args:
            step, of: the name of the step, and its session or update (`AwaitStep`).
            undo: sent to all workers if any worker fails.

        Raises:
            TitopoolError: the first error of any worker.
        """
        self.send_first_then_others(workers, action, undo=undo)
        return self.finish_step(workers, step, of, undo=undo, timeout_s=timeout_s)

    def _start(self, worker: Worker, pending: PendingCommand, action: Action) -> None:
        """Sends an action; the command fails at once if the worker is unreachable."""
        if worker.heartbeat is None:
            pending.mark_lost("it does not answer")
            return
        self._pending[pending.command_id] = pending
        command = Command(worker.heartbeat.incarnation, pending.command_id, action)
        self._send(worker.endpoint, command)

    def _await_outcome(
        self, pending: PendingCommand, deadline: Deadline, timeout_s: float
    ) -> Outcome:
        endpoint = pending.endpoint
        try:
            return Outcome(endpoint, pending.reply.get(timeout=deadline.left_s))
        except gevent.Timeout:
            text = f"the worker at {endpoint} did not answer within {timeout_s:g} s; ask /ready"
            return Outcome(endpoint, error=DeadlinePassed(text))
        except TitopoolError as error:
            was_unreachable = pending.is_lost.is_set() or isinstance(error, NoReadyWorker)
            return Outcome(endpoint, error=error, was_unreachable=was_unreachable)

    # ---- for the link ----------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Commands that no worker has replied to."""
        return len(self._pending)

    def on_done(self, endpoint: str, message: CommandDone) -> None:
        """Wakes the handler that waits for this reply, if it still waits."""
        pending = self._pending.get(message.command_id)
        if pending is None or pending.endpoint != endpoint:
            return
        if message.code:
            error_type = ERRORS_BY_CODE.get(message.code, WeightUpdateFailed)
            pending.reply.set_exception(error_type(message.message))
        else:
            pending.reply.set(message.result)

    def on_worker_lost(self, endpoint: str, reason: str) -> None:
        """Fails the pending commands of a lost worker."""
        for pending in self._pending.values():
            if pending.endpoint == endpoint:
                pending.mark_lost(reason)


def _following(action: Action, first: Result) -> Action:
    names = set(action.__struct_fields__) & first.keys()
    return msgspec.structs.replace(action, **{name: first[name] for name in names})


def _has_failure(sent: Sequence[PendingCommand], deadline: Deadline) -> bool:
    """Returns once a worker has failed, or (False) all have replied or the deadline has passed."""
    waiting = [one.reply for one in sent]
    while waiting and not deadline.has_passed:
        done = gevent.wait(waiting, timeout=deadline.left_s, count=1)
        if not all(one.successful() for one in done):
            return True
        waiting = [one for one in waiting if not one.ready()]
    return False


def is_reachable(worker: Worker) -> bool:
    """Whether a worker answers and serves the pool's model."""
    return worker.heartbeat is not None and worker.phase != "mismatched"


def why_absent(worker: Worker) -> str:
    """Why a worker can run no command; "" if it can."""
    if worker.heartbeat is None:
        return "does not answer"
    if worker.phase == "mismatched":
        return f"serves another model ({worker.reason})"
    return f"is {worker.phase}" if worker.heartbeat.facts is None else ""


def results_of(outcomes: Sequence[Outcome]) -> list[Result]:
    """The workers' results.

    Raises:
        TitopoolError: the first error, if any worker failed.
    """
    for one in outcomes:
        if one.error is not None:
            raise one.error
    return [one.result for one in outcomes if one.result is not None]


def successful_results(outcomes: Sequence[Outcome]) -> list[Result]:
    """The results of the workers that succeeded.

    Raises:
        TitopoolError: the first error, if all workers failed.
    """
    results = [one.result for one in outcomes if one.result is not None]
    return results or results_of(outcomes)
