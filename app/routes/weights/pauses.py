"""Pauses: a client stops generation at all workers, for the time of a lease."""

from flask import Blueprint, request

from app.http.query import query_choice, query_flag
from app.openapi.answers.control import Paused, PauseState, Resumed
from app.openapi.operation import BOOLEAN, COMMAND_ERRORS, Example, Operation, Query
from app.pool.command_sender import results_of, successful_results
from app.routes.weights.workers import reachable_workers, step_timeout_s, worker_statuses
from app.schemas.decoding import decode_body
from app.schemas.weights import MAX_LEASE_S, PAUSE_BODY
from app.service import current_service
from titopool.wire.commands import Pause, Resume
from titopool.wire.pool_state import PauseMode, next_clock

blueprint = Blueprint("pauses", __name__)


# vLLM's names of the pause modes.
VLLM_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "drain", "keep": "keep"}


@blueprint.post("/pause/")
@Operation(
    description="Without a body, or with a query, it is vLLM's form.",
    body=PAUSE_BODY,
    is_body_optional=True,
    errors=COMMAND_ERRORS,
    query=(
        Query(
            "mode",
            {"enum": ["abort", "wait", "keep"], "default": "abort"},
            "vLLM's pause mode; `wait` is `drain`.",
        ),
        Query("clear_cache", BOOLEAN, "Without effect: each commit empties the caches."),
    ),
    examples={"minute": Example("For a minute at most", {"mode": "keep", "lease_s": 60.0})},
)
def pause() -> Paused:
    """Stops generation at every worker for a lease; a second call renews the lease.

    A query or an empty body is vLLM's form. Its lease is that of a step of an update; calls of
    vLLM's routes for weights, updates from a folder and commits renew it. A JSON body is titopool's
    form.
    """
    if request.args or not request.get_data():
        mode = query_choice("mode", VLLM_MODES, default="abort")
        # A commit empties the caches in any case.
        query_flag("clear_cache", default=True)
        lease_s = pause_until_step(mode)
    else:
        body = decode_body(request.get_data(), PAUSE_BODY)
        lease_s = body.lease_s
        _pause(body.mode, lease_s, is_renewed=False)
    return Paused(status="paused", is_paused=True, lease_s=lease_s)


def pause_until_step(mode: PauseMode) -> float:
    """Pauses for a client that knows no leases; returns the lease, that of a step of an update.

    Raises:
        TitopoolError: a worker could not pause.
    """
    lease_s = min(step_timeout_s(), MAX_LEASE_S)
    _pause(mode, lease_s, is_renewed=True)
    return lease_s


def _pause(mode: PauseMode, lease_s: float, *, is_renewed: bool) -> None:
    commands, workers = reachable_workers()
    # A drain takes as long as the longest request.
    timeout_s = current_service().config.request_timeout_s
    clock = next_clock(commands.pool_state.pause.clock)
    action = Pause(mode, lease_s, clock, is_renewed)
    outcomes = commands.gather_outcomes(workers, action, timeout_s=timeout_s)
    # A worker that is loading or was lost learns of the pause before it gets jobs.
    results_of([one for one in outcomes if not one.was_unreachable])
    successful_results(outcomes)


@blueprint.post("/resume/")
@Operation(errors=COMMAND_ERRORS)
def resume() -> Resumed:
    """Ends a pause."""
    commands, workers = reachable_workers()
    action = Resume(next_clock(commands.pool_state.pause.clock))
    results = successful_results(commands.gather_outcomes(workers, action))
    was_paused = any(result["was_paused"] for result in results)
    return Resumed(status="resumed", is_paused=False, was_paused=was_paused)


@blueprint.get("/is_paused/")
@Operation(errors=COMMAND_ERRORS)
def is_paused() -> PauseState:
    """Whether a client has paused any worker, and the seconds until the last lease expires."""
    left_s = lease_left_s()
    return PauseState(is_paused=left_s is not None, lease_left_s=left_s)


def lease_left_s() -> float | None:
    """The seconds until the last lease of any worker expires; None: no client has paused any."""
    reported = [one.result["lease_left_s"] for one in worker_statuses() if one.result]
    # The workers' replies are newer than what this front end knows from heartbeats.
    leases = reported or [current_service().link.pause_left_s]
    return max((lease for lease in leases if lease is not None), default=None)
