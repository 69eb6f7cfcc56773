"""SGLang's pauses, aborts and caches, for the whole pool."""

from flask import Blueprint, Response, request

from app.http.responses import json_response
from app.routes.vllm_rl.aborts import abort
from app.routes.vllm_rl.caches import clear_caches
from app.routes.weights import pauses
from app.schemas.decoding import decode_body
from app.schemas.sglang import ABORT_BODY, CONTINUE_GENERATION_BODY, PAUSE_GENERATION_BODY
from titopool.wire.pool_state import PauseMode

blueprint = Blueprint("control", __name__)

# A commit computes the KV cache of requests in flight again, as after SGLang's `retract`.
SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}


@blueprint.post("/pause_generation/")
def pause_generation() -> Response:
    """Stops generation at every worker until `/continue_generation`, or for a lease at most."""
    body = decode_body(request.get_data() or b"{}", PAUSE_GENERATION_BODY)
    lease_s = pauses.pause_until_step(SGLANG_MODES[body.mode])
    message = "Generation paused successfully."
    return json_response({"message": message, "status": "ok", "lease_s": lease_s})


@blueprint.post("/continue_generation/")
def continue_generation() -> Response:
    """Ends a pause."""
    decode_body(request.get_data() or b"{}", CONTINUE_GENERATION_BODY)
    pauses.resume()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@blueprint.route("/flush_cache/", methods=["GET", "POST"])
def flush_cache() -> Response:
    """Empties all caches; requests in flight go on, so that there is nothing to wait for."""
    return clear_caches()


@blueprint.post("/abort_request/")
def abort_request() -> Response:
    """Ends the requests with this id, or all, with the tokens that they have."""
    body = decode_body(request.get_data(), ABORT_BODY)
    num_aborted = abort(None if body.rid is None else [body.rid])
    return json_response({"status": "aborted", "aborted": num_aborted})
