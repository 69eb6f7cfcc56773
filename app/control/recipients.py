"""The workers that a call needs, and what all calls about weights check."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from app.call.service import current_service
from app.pool.command_sender import STEP_MARGIN_S, CommandSender, Outcome
from app.pool.records import Worker
from titopool.errors import Conflict, InvalidRequest, NoReadyWorker, TitopoolError
from titopool.wire.commands import GetStatus

# For statuses that an error message names.
STATUS_TIMEOUT_S = 5.0


def all_workers() -> tuple[CommandSender, list[Worker]]:
    """The command sender of this process, and all workers in order.

    Raises:
        NoReadyWorker: a worker is unreachable.
    """
    commands = _commands()
    return commands, commands.all_workers()


def whole_pool() -> tuple[CommandSender, list[Worker]]:
    """As `all_workers`, for calls of stock trainers.

    Raises:
        Conflict: a worker is unreachable, still loads or serves another model; it names them all.
    """
    commands = _commands()
    return commands, commands.whole_pool()


def group_workers(
    of: Callable[[], tuple[CommandSender, list[Worker]]], *, is_begin: bool = False
) -> tuple[CommandSender, list[Worker]]:
    """The workers of the trainer's group if it is whole, in order; else those of `of`.

    Workers that have joined the pool since the group formed cannot take part in its updates. They
    catch up with the pool before they serve.

    Args:
        of: `all_workers` or `whole_pool`, which name the workers that a broken group lacks.
        is_begin: refuse a group that has lost a member, which need not have noticed it.

    Raises:
        Conflict: with `is_begin`, members have left the group.
    """
    commands = _commands()
    workers = commands.known_workers()
    # One worker is its group: most pools need no question.
    if is_begin or len(workers) > 1:
        statuses = commands.gather_outcomes(workers, GetStatus(), timeout_s=STATUS_TIMEOUT_S)
        members = [
            (worker, status.result)
            for worker, status in zip(workers, statuses, strict=True)
            if status.result and status.result["session"]
        ]
        groups = {(status["session"], status["group_size"]) for _, status in members}
        # The trainer is one rank.
        num_ranks = current_service().link.facts.world_size * len(members) + 1
        size = groups.pop()[1] if len(groups) == 1 else None
        if size == num_ranks:
            return commands, [worker for worker, _ in members]
        if is_begin and size is not None:
            raise Conflict(
                f"expected the {size - 1} ranks of workers with which the group was formed, got "
                f"{num_ranks - 1}: workers have left or restarted; form a new group"
            )
    return of()


def reachable_workers() -> tuple[CommandSender, list[Worker]]:
    """The command sender of this process, and the reachable workers in order.

    Raises:
        NoReadyWorker: no worker is reachable.
    """
    commands = _commands()
    return commands, commands.reachable_workers()


def _commands() -> CommandSender:
    link = current_service().link
    link.wait_for_heartbeats()
    return link.commands


def worker_statuses() -> list[Outcome]:
    """The status of each reachable worker; empty if no worker is reachable."""
    try:
        commands, workers = reachable_workers()
    except NoReadyWorker:
        return []
    return commands.gather_outcomes(workers, GetStatus())


def restarting_workers(commands: CommandSender, workers: Sequence[Worker]) -> list[str]:
    """Endpoints of workers that restart, e.g. after an update in place that did not end well.

    Workers that do not answer count too.
    """
    outcomes = commands.gather_outcomes(workers, GetStatus(), timeout_s=STATUS_TIMEOUT_S)
    return [
        one.endpoint
        for one in outcomes
        if one.was_unreachable or (one.result and one.result["is_restarting"])
    ]


@contextmanager
def names_restarting_workers(commands: CommandSender, workers: Sequence[Worker]) -> Iterator[None]:
    """Adds to an error which workers restart."""
    try:
        yield
    except TitopoolError as error:
        if endpoints := restarting_workers(commands, workers):
            error.message += f"; these workers restart or do not answer: {', '.join(endpoints)}"
        raise


def step_timeout_s() -> float:
    """The deadline that workers enforce for each step of an update."""
    return current_service().config.weight_update_timeout_s


def commit_timeout_s() -> float:
    """How long a worker may take to accept a call that first ends an update."""
    return 3 * step_timeout_s() + STEP_MARGIN_S


def check_world_size(given: int, workers: Sequence[Worker], num_others: int = 1) -> int:
    """The number of ranks of one worker.

    Args:
        num_others: ranks before those of the workers; the trainer has rank 0.

    Raises:
        InvalidRequest: `given` is not the number of all workers' ranks plus `num_others`.
    """
    size = current_service().link.facts.world_size
    expected = size * len(workers) + num_others
    if given != expected:
        others = "the trainer" if num_others == 1 else f"rank_offset {num_others}"
        raise InvalidRequest(
            f"world_size: expected {expected} ({len(workers)} workers with {size} ranks each, and "
            f"{others}), got {given}; ask /get_world_size",
            param="world_size",
        )
    return size
