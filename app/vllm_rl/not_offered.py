"""vLLM's and SGLang's routes that this server refuses by name, each with what to do."""

from typing import NoReturn

from flask import Blueprint, request

from app.route.operation import Operation
from titopool.errors import InvalidRequest

blueprint = Blueprint("refused", __name__)

DISK = "use /update_weights_from_disk, or vLLM's or titopool's routes for weights"
REASONS = {
    "sleep": "workers keep their GPUs; stop the server to free them",
    "wake_up": "workers do not sleep",
    "is_sleeping": "workers do not sleep; ask /is_paused",
    "collective_rpc": "it would run any method of a worker; use the routes for weights and pauses",
    "start_draft_weight_update": "it has no speculative drafter; use /start_weight_update",
    "init_weights_update_group": DISK,
    "update_weights_from_distributed": DISK,
    "update_weights_from_tensor": DISK,
    "release_memory_occupation": "workers keep their GPUs; stop the server to free them",
    "resume_memory_occupation": "workers keep their GPUs",
}


@blueprint.post("/sleep/")
@blueprint.post("/wake_up/")
@blueprint.get("/is_sleeping/")
@blueprint.post("/collective_rpc/")
@blueprint.post("/start_draft_weight_update/")
@blueprint.post("/init_weights_update_group/")
@blueprint.post("/update_weights_from_distributed/")
@blueprint.post("/update_weights_from_tensor/")
@blueprint.post("/release_memory_occupation/")
@blueprint.post("/resume_memory_occupation/")
@Operation(summary="Not served: a 400 that says what to do.", is_refused=True)
def refuse() -> NoReturn:
    """Raises InvalidRequest with the reason."""
    name = request.path.strip("/")
    raise InvalidRequest(f"/{name}: this server does not have this route: {REASONS[name]}")
