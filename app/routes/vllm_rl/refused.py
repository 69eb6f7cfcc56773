"""vLLM's routes that this server refuses by name, each with what to do."""

from typing import NoReturn

from flask import Blueprint, request

from titopool.errors import InvalidRequest

blueprint = Blueprint("refused", __name__)

REASONS = {
    "sleep": "workers keep their GPUs; stop the server to free them",
    "wake_up": "workers do not sleep",
    "is_sleeping": "workers do not sleep; ask /is_paused",
    "collective_rpc": "it would run any method of a worker; use the routes for weights and pauses",
    "start_draft_weight_update": "it has no speculative drafter; use /start_weight_update",
}


@blueprint.post("/sleep/")
@blueprint.post("/wake_up/")
@blueprint.get("/is_sleeping/")
@blueprint.post("/collective_rpc/")
@blueprint.post("/start_draft_weight_update/")
def refuse() -> NoReturn:
    """Raises InvalidRequest with the reason."""
    name = request.path.strip("/")
    raise InvalidRequest(f"/{name}: this server does not have this route: {REASONS[name]}")
