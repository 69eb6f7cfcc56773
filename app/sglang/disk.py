"""`POST /update_weights_from_disk`: SGLang's form of weights from a folder."""

import msgspec
from flask import Blueprint, request

from app.control.folder import load_folder
from app.control.pool_commands import lease_left_s
from app.http.request_ids import request_id
from app.route.decoding import decode_body
from app.route.error_schemas import ErrorDetail
from app.route.operation import COMMAND_ERRORS, Example, Operation, Reply
from app.sglang.answers import DiskAnswer
from app.sglang.bodies import DISK_BODY, DiskBody
from titopool.errors import TitopoolError, WeightsLost
from titopool.wire.pool_state import PauseMode

blueprint = Blueprint("updates", __name__)


class DiskFailure(DiskAnswer, kw_only=True):
    """Every failure of /update_weights_from_disk, in SGLang's shape and the server's own."""

    error: ErrorDetail


@blueprint.post("/update_weights_from_disk/")
@Operation(
    body=DISK_BODY,
    failure=DiskFailure,
    errors=(*COMMAND_ERRORS, WeightsLost),
    examples={
        "folder": Example(
            "A folder below weights_root",
            {"model_path": "/weights/step-7", "weight_version": "step-7"},
        )
    },
)
def update_weights_from_disk() -> Reply[DiskAnswer]:
    """Loads a folder that every worker can read, below `weights_root`.

    As in SGLang, every failure is a 400 with `success` false.
    """
    # SGLang's count of requests in flight is not known.
    try:
        version = _update(decode_body(request.get_data(), DISK_BODY))
    except TitopoolError as error:
        detail = msgspec.convert(error.to_dict(request_id())["error"], ErrorDetail)
        failure = DiskFailure(
            success=False, message=error.message, num_paused_requests=0, error=detail
        )
        return Reply(failure, 400)
    message = f"All workers serve version {version}."
    return Reply(DiskAnswer(success=True, message=message, num_paused_requests=0), 200)


def _update(body: DiskBody) -> int:
    """The version of the new weights.

    Raises:
        TitopoolError: the old weights serve, or the weights are lost.
    """
    policy: PauseMode = "abort"
    if not body.abort_all_requests:
        # As in SGLang, requests that a client's pause keeps go on with the new weights.
        policy = "drain" if lease_left_s() is None else "keep"
    label = body.weight_version or ""
    return load_folder(body.model_path, policy, label=label).version
