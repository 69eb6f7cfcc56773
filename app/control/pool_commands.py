"""Single commands to the whole pool that several protocols send: pauses, aborts, emptied caches."""

import uuid
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.call.service import current_service
from app.control.recipients import reachable_workers, step_timeout_s, whole_pool, worker_statuses
from app.http.auth import current_key, sees_all_requests
from app.pool.command_sender import results_of, successful_results
from titopool.wire.commands import AbortRequests, ClearCaches, Pause, Resume
from titopool.wire.messages import owned_id
from titopool.wire.pool_state import PauseMode, next_clock

MAX_LEASE_S = 86_400
# How the ids begin that OpenAI's routes answer with, and vLLM's /inference/v1/generate.
PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")


class Message(msgspec.Struct, kw_only=True):
    """The call is done."""

    message: str


class Success(msgspec.Struct, kw_only=True):
    """The call is done."""

    success: bool
    message: str | UnsetType = UNSET


class AbortedRequests(msgspec.Struct, kw_only=True):
    """The number of jobs that were ended."""

    status: Literal["aborted"]
    aborted: int


def pause_until_step(mode: PauseMode) -> float:
    """Pauses for a client that knows no leases; returns the lease, that of a step of an update.

    Raises:
        TitopoolError: a worker could not pause.
    """
    lease_s = min(step_timeout_s(), MAX_LEASE_S)
    pause_all(mode, lease_s, is_renewed=True)
    return lease_s


def pause_all(mode: PauseMode, lease_s: float, *, is_renewed: bool) -> None:
    """Pauses every worker that answers.

    Args:
        is_renewed: calls of vLLM's routes for weights renew the lease.

    Raises:
        TitopoolError: a worker could not pause.
    """
    commands, workers = reachable_workers()
    # A drain takes as long as the longest request.
    timeout_s = current_service().config.request_timeout_s
    clock = next_clock(commands.pool_state.pause.clock)
    action = Pause(mode, lease_s, clock, is_renewed)
    outcomes = commands.gather_outcomes(workers, action, timeout_s=timeout_s)
    # A worker that is loading or was lost learns of the pause before it gets jobs.
    results_of([one for one in outcomes if not one.was_unreachable])
    successful_results(outcomes)


def resume_all() -> bool:
    """Ends a pause; returns whether there was one."""
    commands, workers = reachable_workers()
    action = Resume(next_clock(commands.pool_state.pause.clock))
    results = successful_results(commands.gather_outcomes(workers, action))
    return any(result["was_paused"] for result in results)


def lease_left_s() -> float | None:
    """The seconds until the last lease of any worker expires; None: no client has paused any."""
    reported = [one.result["lease_left_s"] for one in worker_statuses() if one.result]
    # The workers' replies are newer than what this front end knows from heartbeats.
    leases = reported or [current_service().link.pause_left_s]
    return max((lease for lease in leases if lease is not None), default=None)


def end_requests(request_ids: list[str] | None) -> int:
    """Ends the requests with these ids, None: all, at every worker and front end.

    A key that is no administrator's means its own requests: ids are easy to guess.

    Returns:
        The number of jobs that were ended.
    """
    wanted = request_ids and [one for given in request_ids for one in _meanings(given)]
    if wanted and not sees_all_requests():
        wanted = [owned_id(current_key().name, one) for one in wanted]
    commands, workers = reachable_workers()
    results = successful_results(commands.gather_outcomes(workers, AbortRequests(wanted)))
    return sum(one["num_aborted"] for one in results)


def _meanings(given: str) -> list[str]:
    """The clients' ids that `given` may mean: a header may begin with a prefix too."""
    return [given, *(given.removeprefix(one) for one in PREFIXES if given.startswith(one))]


def clear_caches() -> Success:
    """Empties all caches: to empty more than was asked for costs time only."""
    commands, workers = whole_pool()
    name = uuid.uuid4().hex
    results_of(commands.gather_outcomes(workers, ClearCaches(name)))
    results_of(commands.await_step(workers, "clear", name, timeout_s=step_timeout_s()))
    return Success(success=True)
