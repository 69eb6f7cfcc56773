"""vLLM's routes for weights, versions, caches and aborts."""

import msgspec

from app.openapi.answers.control import (
    AbortedRequests,
    Checksums,
    Committed,
    Compared,
    Finished,
    Labelled,
    Message,
    ServerInfo,
    Success,
    WeightInfo,
)
from app.openapi.operation import COMMAND_ERRORS, Example, Operation, Query
from app.openapi.operations.weights import BOOLEAN
from app.schemas.vllm_rl import (
    ABORT_REQUESTS_BODY,
    CHECKER_BODY,
    FINISH_BODY,
    INIT_ENGINE_BODY,
    VERSION_BODY,
    UpdateInfo,
)
from app.schemas.weights import FOLDER_BODY
from titopool.errors import NoReadyWorker

TAG = "vllm_rl"


class UpdateWeightsBody(msgspec.Struct, kw_only=True):
    """`POST /update_weights`, vLLM's form: tensors that the trainer broadcasts."""

    update_info: UpdateInfo


UPDATE_WEIGHTS_BODY = msgspec.json.Decoder(UpdateWeightsBody)
REFUSED = "Not served: a 400 that says what to do."

OPERATIONS: dict[str, Operation] = {
    "vllm_rl.weight_transfer.init_weight_transfer_engine": Operation(
        tag=TAG,
        description="Either `master_address` with `master_port`, or `nccl_unique_id_b64`.",
        body=INIT_ENGINE_BODY,
        answer=Message,
        errors=COMMAND_ERRORS,
        never_repeated="yes",
        examples={
            "gloo": Example(
                "A trainer that listens on this host, workers on CPUs",
                {
                    "init_info": {
                        "master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1,
                        "world_size": 2, "backend": "gloo",
                    }
                },
            )
        },
    ),
    "vllm_rl.weight_transfer.start_weight_update": Operation(
        tag=TAG, answer=Message, errors=COMMAND_ERRORS, never_repeated="yes"
    ),
    "vllm_rl.weight_transfer.update_weights": Operation(
        tag=TAG,
        description=(
            "Of `path` and `weight_dir` the body has one; with `path`, `policy` is required."
        ),
        body=(FOLDER_BODY, UPDATE_WEIGHTS_BODY),
        answer=(Message, Committed),
        errors=COMMAND_ERRORS,
        never_repeated="yes",
        examples={
            "tensors": Example(
                "Tensors",
                {
                    "update_info": {
                        "names": ["lm_head.weight"], "dtype_names": ["float32"],
                        "shapes": [[2048, 64]],
                    }
                },
            ),
            "folder": Example(
                "A folder below weights_root", {"path": "/weights/step-7", "policy": "keep"}
            ),
        },
    ),
    "vllm_rl.weight_transfer.finish_weight_update": Operation(
        tag=TAG,
        body=FINISH_BODY,
        is_body_optional=True,
        answer=Finished,
        errors=COMMAND_ERRORS,
        never_repeated="yes",
        examples={"label": Example("With a label", {"weight_version": "step-7"})},
    ),
    "vllm_rl.weight_transfer.shutdown_weight_transfer_engine": Operation(
        tag=TAG, answer=Message, errors=COMMAND_ERRORS, never_repeated="yes"
    ),
    "vllm_rl.versions.update_weight_version": Operation(
        tag=TAG,
        body=VERSION_BODY,
        answer=Labelled,
        errors=COMMAND_ERRORS,
        never_repeated="yes",
        examples={"label": Example("A label", {"new_version": "step-7"})},
    ),
    "vllm_rl.checksums.weight_checker": Operation(
        tag=TAG,
        description="`compare` needs `baseline`; `reset` is refused.",
        body=CHECKER_BODY,
        answer=(Checksums, Compared),
        errors=COMMAND_ERRORS,
        never_repeated="yes",
        examples={
            "checksum": Example("Digests", {"action": "checksum"}),
            "compare": Example(
                "A comparison", {"action": "compare", "baseline": {"dp0:lm_head.weight": "0"}}
            ),
        },
    ),
    "vllm_rl.caches.reset_prefix_cache": Operation(
        tag=TAG,
        answer=Success,
        errors=COMMAND_ERRORS,
        never_repeated="yes",
        query=(
            Query("reset_running_requests", BOOLEAN, "Without effect: requests go on."),
            Query("reset_external", BOOLEAN, "Without effect: there is no external cache."),
        ),
    ),
    "vllm_rl.caches.reset_mm_cache": Operation(
        tag=TAG, answer=Success, errors=COMMAND_ERRORS, never_repeated="yes"
    ),
    "vllm_rl.caches.reset_encoder_cache": Operation(
        tag=TAG, answer=Success, errors=COMMAND_ERRORS, never_repeated="yes"
    ),
    "vllm_rl.aborts.abort_requests": Operation(
        tag=TAG,
        body=ABORT_REQUESTS_BODY,
        answer=AbortedRequests,
        errors=COMMAND_ERRORS,
        never_repeated="yes",
        examples={"one": Example("One request", {"request_ids": ["rollout-17"]})},
    ),
    "vllm_rl.refused.refuse": Operation(tag=TAG, summary=REFUSED, is_refused=True),
    "server_info.server_info": Operation(
        tag=TAG,
        answer=ServerInfo,
        errors=(NoReadyWorker,),
        never_repeated="yes",
        query=(
            Query(
                "config_format",
                {"enum": ["text", "json"], "default": "text"},
                "Whether `vllm_config` is an object or its JSON as a string.",
            ),
        ),
    ),
    "server_info.weight_info": Operation(
        tag=TAG, answer=WeightInfo, errors=COMMAND_ERRORS, never_repeated="yes"
    ),
}  # fmt: skip
