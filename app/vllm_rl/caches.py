"""Routes that empty caches. `/reset_prefix_cache` also ends an update, for TRL's old and new client."""

from flask import Blueprint

from app.control.commit import commit_update
from app.control.pool_commands import Success, clear_caches
from app.control.recipients import step_timeout_s, whole_pool
from app.pool.command_sender import results_of
from app.route.operation import BOOLEAN, COMMAND_ERRORS, Operation, Query
from app.route.query import query_flag
from app.vllm_rl.statuses import never_repeated
from app.vllm_rl.weight_transfer import end_tensors
from titopool.wire.commands import EndTensors, PrepareUpdate

blueprint = Blueprint("caches", __name__)


@blueprint.post("/reset_prefix_cache/")
@never_repeated
@Operation(
    errors=COMMAND_ERRORS,
    query=(
        Query("reset_running_requests", BOOLEAN, "Without effect: requests go on."),
        Query("reset_external", BOOLEAN, "Without effect: there is no external cache."),
    ),
)
def reset_prefix_cache() -> Success:
    """Commits what is staged, and empties the caches; a body is ignored.

    Requests in flight always continue, and there is no external cache, so that the two flags of
    vLLM's query change nothing.
    """
    query_flag("reset_running_requests", default=False)
    query_flag("reset_external", default=False)
    commands, workers = whole_pool()
    ended = end_tensors(commands, workers, EndTensors(is_last_call=True))
    if update_id := ended.get("update_id"):
        # The commit empties the caches.
        commit_update(commands, workers, PrepareUpdate(update_id, None))
    else:
        timeout_s = 3 * step_timeout_s()
        results_of(commands.await_step(workers, "finish", "tensors", timeout_s=timeout_s))
    return Success(success=True, message="Request received, resetting prefix cache")


@blueprint.post("/reset_mm_cache/")
@never_repeated
@Operation(errors=COMMAND_ERRORS)
def reset_mm_cache() -> Success:
    """Empties the caches of processed images."""
    return clear_caches()


@blueprint.post("/reset_encoder_cache/")
@never_repeated
@Operation(errors=COMMAND_ERRORS)
def reset_encoder_cache() -> Success:
    """Empties the caches of encoded images."""
    return clear_caches()
