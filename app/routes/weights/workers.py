"""The workers that a call needs, and what all calls about weights check."""

from collections.abc import Sequence

from app.pool.command_sender import CommandSender, Outcome
from app.pool.records import Worker
from app.service import current_service
from titopool.errors import InvalidRequest, NoReadyWorker
from titopool.wire.commands import GetStatus


def all_workers() -> tuple[CommandSender, list[Worker]]:
    """The command sender of this process, and all workers in order.

    Raises:
        NoReadyWorker: a worker is unreachable.
    """
    commands = _commands()
    return commands, commands.all_workers()


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


def step_timeout_s() -> float:
    """The deadline that workers enforce for each step of an update."""
    return current_service().config.weight_update_timeout_s


def check_world_size(given: int, workers: Sequence[Worker]) -> int:
    """The number of ranks of one worker.

    Raises:
        InvalidRequest: `given` is not the number of all workers' ranks plus the trainer's.
    """
    size = current_service().link.facts.world_size
    expected = size * len(workers) + 1
    if given != expected:
        raise InvalidRequest(
            f"world_size: expected {expected} ({len(workers)} workers with {size} ranks each, and "
            f"the trainer), got {given}; ask /get_world_size",
            param="world_size",
        )
    return size
