"""`POST /update_weights_from_disk`: SGLang's form of weights from a folder."""

from flask import Blueprint, Response, request

from app.http.request_ids import request_id
from app.http.responses import json_response
from app.openapi.answers.control import DiskAnswer
from app.openapi.errors import ErrorDetail
from app.openapi.operation import COMMAND_ERRORS, Example, Operation
from app.routes.weights.pauses import lease_left_s
from app.routes.weights.updates import load_folder
from app.schemas.decoding import decode_body
from app.schemas.sglang import DISK_BODY, DiskBody
from titopool.errors import TitopoolError, WeightsLost
from titopool.wire.pool_state import PauseMode

blueprint = Blueprint("updates", __name__)


class DiskFailure(DiskAnswer, kw_only=True):
    """Every failure of /update_weights_from_disk, in SGLang's shape and the server's own."""

    error: ErrorDetail


@blueprint.post("/update_weights_from_disk/")
@Operation(
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
)
def update_weights_from_disk() -> Response:
    """Loads a folder that every worker can read, below `weights_root`.

    As in SGLang, every failure is a 400 with `success` false.
    """
    # SGLang's count of requests in flight is not known.
    answer = {"success": True, "message": "", "num_paused_requests": 0}
    try:
        version = _update(decode_body(request.get_data(), DISK_BODY))
    except TitopoolError as error:
        refused = {"success": False, "message": error.message, **error.to_dict(request_id())}
        return json_response(answer | refused, 400)
    return json_response(answer | {"message": f"All workers serve version {version}."})


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
    version: int = load_folder(body.model_path, policy, label=label)["version"]
    return version
