"""titopool's own routes for weights, TRL's protocol up to 1.10, pauses and LoRA adapters."""

from app.openapi.answers.control import (
    Aborted,
    Accepted,
    Adapter,
    Begun,
    Closed,
    Committed,
    Joined,
    Message,
    Paused,
    PauseState,
    Resumed,
    Weights,
)
from app.openapi.operation import COMMAND_ERRORS, Example, Operation, Query
from app.schemas.weights import (
    ABORT_BODY,
    ACCEPT_BODY,
    BEGIN_BODY,
    CLOSE_BODY,
    COMMIT_BODY,
    INIT_BODY,
    LOAD_ADAPTER_BODY,
    PAUSE_BODY,
    TRL_INIT_BODY,
    TRL_TENSOR_BODY,
    UNLOAD_ADAPTER_BODY,
)
from titopool.errors import ModelNotFound

TAG = "weights"
UPDATE = "5f0c4c2e9a3b4f5e8d7c6b5a49382716"
TENSORS = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[2048, 64]]}
BOOLEAN = {"type": "boolean"}

OPERATIONS = {
    "weights.updates.init": Operation(
        tag=TAG,
        body=INIT_BODY,
        answer=Joined,
        errors=COMMAND_ERRORS,
        examples={
            "gloo": Example(
                "A trainer that listens on this host",
                {
                    "session": "trainer-1", "backend": "gloo", "host": "127.0.0.1", "port": 29500,
                    "world_size": 2,
                },
            )
        },
    ),
    "weights.updates.begin": Operation(
        tag=TAG,
        body=BEGIN_BODY,
        answer=Begun,
        errors=COMMAND_ERRORS,
        examples={
            "partial": Example(
                "Some of the model's tensors", {"session": "trainer-1", "partial": True, **TENSORS}
            )
        },
    ),
    "weights.updates.commit": Operation(
        tag=TAG,
        body=COMMIT_BODY,
        answer=Committed,
        errors=COMMAND_ERRORS,
        examples={
            "keep": Example("Requests go on with the new weights", {"update": UPDATE, "policy": "keep"})
        },
    ),
    "weights.updates.abort": Operation(
        tag=TAG,
        body=ABORT_BODY,
        answer=Aborted,
        errors=COMMAND_ERRORS,
        examples={"one": Example("An update", {"update": UPDATE, "reason": "a loss of NaN"})},
    ),
    "weights.updates.close": Operation(
        tag=TAG,
        body=CLOSE_BODY,
        answer=Closed,
        errors=COMMAND_ERRORS,
        examples={"one": Example("A group", {"session": "trainer-1"})},
    ),
    "weights.status.status": Operation(tag=TAG, answer=Weights, errors=COMMAND_ERRORS),
    "weights.status.accept": Operation(
        tag=TAG,
        body=ACCEPT_BODY,
        is_body_optional=True,
        answer=Accepted,
        errors=COMMAND_ERRORS,
    ),
    "weights.pauses.pause": Operation(
        tag=TAG,
        description="Without a body, or with a query, it is vLLM's form.",
        body=PAUSE_BODY,
        is_body_optional=True,
        answer=Paused,
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
    ),
    "weights.pauses.resume": Operation(tag=TAG, answer=Resumed, errors=COMMAND_ERRORS),
    "weights.pauses.is_paused": Operation(tag=TAG, answer=PauseState, errors=COMMAND_ERRORS),
    "weights.trl_weights.init_communicator": Operation(
        tag=TAG,
        body=TRL_INIT_BODY,
        answer=Message,
        errors=COMMAND_ERRORS,
        examples={
            "client": Example(
                "TRL's client", {"host": "127.0.0.1", "port": 51216, "world_size": 2}
            )
        },
    ),
    "weights.trl_weights.update_named_param": Operation(
        tag=TAG,
        body=TRL_TENSOR_BODY,
        answer=Message,
        errors=COMMAND_ERRORS,
        examples={
            "tensor": Example(
                "A tensor",
                {"name": "lm_head.weight", "dtype": "torch.float32", "shape": [2048, 64]},
            )
        },
    ),
    "weights.trl_weights.close_communicator": Operation(
        tag=TAG, answer=Message, errors=COMMAND_ERRORS
    ),
    "weights.adapters.load_adapter": Operation(
        tag=TAG,
        body=LOAD_ADAPTER_BODY,
        answer=Adapter,
        errors=COMMAND_ERRORS,
        examples={
            "folder": Example(
                "A folder below weights_root",
                {"lora_name": "math", "lora_path": "/weights/math-1"},
            )
        },
    ),
    "weights.adapters.unload_adapter": Operation(
        tag=TAG,
        body=UNLOAD_ADAPTER_BODY,
        answer=Adapter,
        errors=(*COMMAND_ERRORS, ModelNotFound),
        examples={"name": Example("An adapter", {"lora_name": "math"})},
    ),
}  # fmt: skip
