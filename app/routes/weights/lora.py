"""LoRA adapters: `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM's server.

Other than there, a name that is loaded gets a new version, at all workers or at none, while
requests run on the old one.
"""

from flask import Blueprint, Response, request

from app.http.responses import json_response
from app.routes.weights.weights import all_workers, check_any, reachable_workers
from app.schemas.decoding import decode_body
from app.schemas.weights import LOAD_ADAPTER_BODY, UNLOAD_ADAPTER_BODY
from app.service import current_service
from titopool.errors import InvalidRequest
from titopool.wire.commands import DropAdapter, GetStatus, LoadAdapter, SwitchAdapter, UnloadAdapter
from titopool.wire.pool_state import next_clock

blueprint = Blueprint("adapters", __name__)


@blueprint.post("/v1/load_lora_adapter/")
def load_adapter() -> Response:
    """Loads an adapter from a folder under a name, or a new version of one."""
    body = decode_body(request.get_data(), LOAD_ADAPTER_BODY)
    service = current_service()
    facts = service.link.facts
    if not facts.max_loras:
        raise InvalidRequest(
            "lora_name: expected a server with adapters; start it with --enable-lora",
            param="lora_name",
        )
    if body.lora_name == facts.model:
        raise InvalidRequest(
            f"lora_name: expected another name than the model's, got {body.lora_name!r}",
            param="lora_name",
        )
    commands, workers = all_workers()
    version = body.version
    if version is None:
        statuses = commands.gather_results(workers, GetStatus())
        version = max(one["adapter_versions"].get(body.lora_name, 0) for one in statuses) + 1
    drop = DropAdapter(body.lora_name, version)
    load = LoadAdapter(body.lora_name, version, body.lora_path)
    commands.send_first_then_others(workers, lambda index, first: load, undo=drop)
    # All have it: a worker that misses the switch makes it when it hears of it.
    switch = SwitchAdapter(body.lora_name, version, next_clock(commands.pool_state.adapters.clock))
    check_any(commands.gather_outcomes(workers, switch))
    return json_response({"lora_name": body.lora_name, "version": version})


@blueprint.post("/v1/unload_lora_adapter/")
def unload_adapter() -> Response:
    """Takes an adapter away; requests that run on it end with it."""
    body = decode_body(request.get_data(), UNLOAD_ADAPTER_BODY)
    commands, workers = reachable_workers()
    action = UnloadAdapter(body.lora_name, next_clock(commands.pool_state.adapters.clock))
    outcomes = commands.gather_outcomes(workers, action)
    # One that has heard of it from another worker has nothing to take away any more.
    check_any(outcomes)
    version = max(one.result["version"] for one in outcomes if one.result)
    return json_response({"lora_name": body.lora_name, "version": version})
