"""LoRA adapters: `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM's server.

prime-rl calls both without `/v1`.

Unlike in vLLM, loading a name again replaces its version, at all workers or at none, while running
requests keep the old version.
"""

from flask import Blueprint

from app.call.service import current_service
from app.control.recipients import all_workers, reachable_workers
from app.pool.command_sender import results_of, successful_results
from app.route.operation import COMMAND_ERRORS, Example, Operation
from app.weights.bodies import LoadAdapterBody, UnloadAdapterBody
from titopool.answers.weights import Adapter
from titopool.errors import InvalidRequest, ModelNotFound
from titopool.wire.commands import DropAdapter, GetStatus, LoadAdapter, SwitchAdapter, UnloadAdapter
from titopool.wire.pool_state import next_clock

blueprint = Blueprint("adapters", __name__)


@blueprint.post("/load_lora_adapter/")
@blueprint.post("/v1/load_lora_adapter/")
@Operation(
    errors=COMMAND_ERRORS,
    examples={
        "folder": Example(
            "A folder below weights_root",
            {"lora_name": "math", "lora_path": "/weights/math-1"},
        )
    },
)
def load_adapter(body: LoadAdapterBody) -> Adapter:
    """Loads an adapter, or a new version of an adapter, from a folder."""
    service = current_service()
    facts = service.link.facts
    if not facts.max_loras:
        raise InvalidRequest(
            "lora_name: expected a server with adapters, got one without; start the server with "
            "--enable-lora",
            param="lora_name",
        )
    if body.lora_name == facts.model:
        raise InvalidRequest(
            f"lora_name: expected a name other than the model's, got {body.lora_name!r}",
            param="lora_name",
        )
    commands, workers = all_workers()
    version = body.version
    if version is None:
        statuses = results_of(commands.gather_outcomes(workers, GetStatus()))
        version = max(one["adapter_versions"].get(body.lora_name, 0) for one in statuses) + 1
    load = LoadAdapter(body.lora_name, version, body.lora_path)
    drop = DropAdapter(body.lora_name, version)
    commands.send_first_then_others(workers, load, undo=drop)
    # All workers have loaded the version; a worker that misses the switch learns of it from Hello.
    switch = SwitchAdapter(body.lora_name, version, next_clock(commands.pool_state.adapters.clock))
    successful_results(commands.gather_outcomes(workers, switch))
    return Adapter(lora_name=body.lora_name, version=version)


@blueprint.post("/unload_lora_adapter/")
@blueprint.post("/v1/unload_lora_adapter/")
@Operation(
    errors=(*COMMAND_ERRORS, ModelNotFound),
    examples={"name": Example("An adapter", {"lora_name": "math"})},
)
def unload_adapter(body: UnloadAdapterBody) -> Adapter:
    """Unloads an adapter; requests that still run finish with it."""
    commands, workers = reachable_workers()
    action = UnloadAdapter(body.lora_name, next_clock(commands.pool_state.adapters.clock))
    outcomes = commands.gather_outcomes(workers, action)
    # A worker that learned of the removal from a front end has already unloaded the adapter.
    version = max(result["version"] for result in successful_results(outcomes))
    return Adapter(lora_name=body.lora_name, version=version)
