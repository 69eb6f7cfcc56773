"""SGLang's native routes but for `/generate`."""

from app.openapi.answers.control import (
    AbortedRequests,
    DiskAnswer,
    SGLangPaused,
    SGLangResumed,
    Success,
)
from app.openapi.errors import ErrorDetail
from app.openapi.operation import COMMAND_ERRORS, Example, Operation
from app.schemas.sglang import (
    ABORT_BODY,
    CONTINUE_GENERATION_BODY,
    DISK_BODY,
    PAUSE_GENERATION_BODY,
)
from titopool.errors import WeightsLost

TAG = "sglang"


class DiskFailure(DiskAnswer, kw_only=True):
    """Every failure of /update_weights_from_disk, in SGLang's shape and the server's own."""

    error: ErrorDetail


OPERATIONS: dict[str, Operation] = {
    "sglang.control.pause_generation": Operation(
        tag=TAG,
        body=PAUSE_GENERATION_BODY,
        is_body_optional=True,
        answer=SGLangPaused,
        errors=COMMAND_ERRORS,
        examples={"in_place": Example("Requests go on later", {"mode": "in_place"})},
    ),
    "sglang.control.continue_generation": Operation(
        tag=TAG,
        body=CONTINUE_GENERATION_BODY,
        is_body_optional=True,
        answer=SGLangResumed,
        errors=COMMAND_ERRORS,
        examples={"plain": Example("No options", {})},
    ),
    "sglang.control.flush_cache": Operation(tag=TAG, answer=Success, errors=COMMAND_ERRORS),
    "sglang.control.abort_request": Operation(
        tag=TAG,
        description="The body has either `rid` or `abort_all`.",
        body=ABORT_BODY,
        answer=AbortedRequests,
        errors=COMMAND_ERRORS,
        examples={"one": Example("One request", {"rid": "rollout-17"})},
    ),
    "sglang.updates.update_weights_from_disk": Operation(
        tag=TAG,
        body=DISK_BODY,
        answer=DiskAnswer,
        failure=DiskFailure,
        errors=(*COMMAND_ERRORS, WeightsLost),
        examples={
            "folder": Example(
                "A folder below weights_root",
                {"model_path": "/weights/step-7", "weight_version": "step-7"},
            )
        },
    ),
}
