"""What a trainer asks before it sends weights: the server's settings, and the version's label.

These routes change nothing and need no admin key.
"""

from typing import Any

import orjson
from flask import Blueprint

from app.call.service import current_service
from app.control.recipients import worker_statuses
from app.route.operation import COMMAND_ERRORS, Operation, Query
from app.route.query import query_choice
from app.vllm_rl.answers import ServerInfo
from app.vllm_rl.statuses import never_repeated
from titopool.answers.operators import WeightInfo
from titopool.errors import NoReadyWorker
from titopool.wire.messages import WorkerFacts

blueprint = Blueprint("server_info", __name__)

FORMATS = {"text": False, "json": True}


@blueprint.get("/server_info/")
@never_repeated
@Operation(
    errors=(NoReadyWorker,),
    query=(
        Query(
            "config_format",
            {"enum": ["text", "json"], "default": "text"},
            "Whether `vllm_config` is an object or its JSON as a string.",
        ),
    ),
)
def server_info() -> ServerInfo:
    """The settings that TRL's clients read (1.16), and no others: no environment, no paths."""
    is_json = query_choice("config_format", FORMATS, default=False)
    config = shown_config(current_service().link.facts)
    return ServerInfo(vllm_config=config if is_json else orjson.dumps(config).decode())


def shown_config(facts: WorkerFacts) -> dict[str, Any]:
    """`vllm_config` as vLLM's server shows it, as far as trainers read it."""
    lora = {"max_lora_rank": facts.max_lora_rank, "max_loras": facts.max_loras}
    return {
        "weight_transfer_config": {"backend": facts.weight_backend},
        "model_config": {"logprobs_mode": facts.logprobs_mode, "dtype": facts.dtype},
        "lora_config": lora if facts.max_loras else None,
        # An adapter is loaded into every engine, as into one: with more, TRL would not load it.
        "parallel_config": {"data_parallel_size": 1},
    }


@blueprint.get("/weight_info/")
@never_repeated
@Operation(errors=COMMAND_ERRORS)
def weight_info() -> WeightInfo:
    """The label of the version that serves."""
    # Workers send what they know of the pool before they answer.
    worker_statuses()
    weights = current_service().link.commands.pool_state.weights
    return WeightInfo(weight_version=weights.shown_label)
