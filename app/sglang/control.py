"""SGLang's pauses, aborts and caches, for the whole pool."""

from flask import Blueprint

from app.control.pool_commands import (
    AbortedRequests,
    Success,
    clear_caches,
    end_requests,
    pause_until_step,
    resume_all,
)
from app.route.operation import COMMAND_ERRORS, Example, Operation
from app.sglang.answers import SGLangPaused, SGLangResumed
from app.sglang.bodies import ContinueGenerationBody, PauseGenerationBody, SglangAbortBody
from titopool.wire.pool_state import PauseMode

blueprint = Blueprint("control", __name__)

# A commit computes the KV cache of requests in flight again, as after SGLang's `retract`.
SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}


@blueprint.post("/pause_generation/")
@Operation(
    is_body_optional=True,
    errors=COMMAND_ERRORS,
    examples={"in_place": Example("Requests go on later", {"mode": "in_place"})},
)
def pause_generation(body: PauseGenerationBody) -> SGLangPaused:
    """Stops generation at every worker until `/continue_generation`, or for a lease at most."""
    lease_s = pause_until_step(SGLANG_MODES[body.mode])
    message = "Generation paused successfully."
    return SGLangPaused(message=message, status="ok", lease_s=lease_s)


@blueprint.post("/continue_generation/")
@Operation(
    is_body_optional=True,
    errors=COMMAND_ERRORS,
    examples={"plain": Example("No options", {})},
)
def continue_generation(body: ContinueGenerationBody) -> SGLangResumed:
    """Ends a pause."""
    resume_all()
    return SGLangResumed(message="Generation continued successfully.", status="ok")


@blueprint.route("/flush_cache/", methods=["GET", "POST"])
@Operation(errors=COMMAND_ERRORS)
def flush_cache() -> Success:
    """Empties all caches; requests in flight go on, so that there is nothing to wait for."""
    return clear_caches()


@blueprint.post("/abort_request/")
@Operation(
    description="The body has either `rid` or `abort_all`.",
    errors=COMMAND_ERRORS,
    examples={"one": Example("One request", {"rid": "rollout-17"})},
)
def abort_request(body: SglangAbortBody) -> AbortedRequests:
    """Ends the requests with this id, or all, with the tokens that they have."""
    num_aborted = end_requests(None if body.rid is None else [body.rid])
    return AbortedRequests(status="aborted", aborted=num_aborted)
