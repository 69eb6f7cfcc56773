"""Pauses: a client stops generation at all workers, for the time of a lease."""

from flask import Blueprint, request

from app.control.pool_commands import lease_left_s, pause_all, pause_until_step, resume_all
from app.route.decoding import decode_body
from app.route.operation import BOOLEAN, COMMAND_ERRORS, Example, Operation, Query
from app.route.query import query_choice, query_flag
from app.weights.bodies import PAUSE_BODY
from titopool.answers.weights import Paused, PauseState, Resumed
from titopool.wire.pool_state import PauseMode

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
        pause_all(body.mode, lease_s, is_renewed=False)
    return Paused(status="paused", is_paused=True, lease_s=lease_s)


@blueprint.post("/resume/")
@Operation(errors=COMMAND_ERRORS)
def resume() -> Resumed:
    """Ends a pause."""
    return Resumed(status="resumed", is_paused=False, was_paused=resume_all())


@blueprint.get("/is_paused/")
@Operation(errors=COMMAND_ERRORS)
def is_paused() -> PauseState:
    """Whether a client has paused any worker, and the seconds until the last lease expires."""
    left_s = lease_left_s()
    return PauseState(is_paused=left_s is not None, lease_left_s=left_s)
