"""Weight updates as TRL's client does them: one call for each parameter, none to begin or end.

The client joins, and sends, only after it has its answer, so a call is answered when every worker
has accepted it. An update ends at `/reset_prefix_cache/`, or when all of the model's tensors are
there, or at a generation (`workers/control.py`).
"""

import re
import uuid

from flask import Blueprint, Response, request

from app.commands import Commands, Result
from app.health import json_response
from app.pool import Worker
from app.schemas import decode_body
from app.weight_bodies import TRL_INIT_BODY, TRL_TENSOR_BODY
from app.weights import check_world_size, everyone, step_timeout_s, tell_all
from titopool.commands import (
    FinishTensors,
    JoinGroup,
    LeaveGroup,
    ReceiveTensor,
    TensorInfo,
)
from titopool.errors import TitopoolError

blueprint = Blueprint("trl_weights", __name__)


@blueprint.post("/init_communicator/")
def init_communicator() -> Response:
    """The group's ranks are the workers' processes in order, and the client last."""
    body = decode_body(request.get_data(), TRL_INIT_BODY)
    commands, workers = everyone()
    size = check_world_size(body.world_size, workers)
    session = f"trl-{uuid.uuid4().hex[:12]}"

    def join(index: int, _: Result) -> JoinGroup:
        # The first worker listens where the client says; the others look for it at its address.
        host = body.host if index == 0 else host_of(workers[0].endpoint)
        return JoinGroup(
            session, "trl", "auto", host, body.port, index * size, body.world_size,
            body.client_device_uuid,
        )  # fmt: skip

    try:
        commands.in_turn(workers, join)
    except TitopoolError:
        tell_all(commands, workers, LeaveGroup(session))
        raise
    return json_response({"message": "Request received, initializing communicator"})


def host_of(endpoint: str) -> str:
    """The host of a worker as other workers reach it."""
    found = re.fullmatch(r"tcp://\[?(.+?)\]?:\d+", endpoint)
    return found[1] if found else "127.0.0.1"


@blueprint.post("/update_named_param/")
def update_named_param() -> Response:
    """The client sends this tensor next."""
    body = decode_body(request.get_data(), TRL_TENSOR_BODY)
    commands, workers = everyone()
    tensor = TensorInfo(body.name, body.dtype.removeprefix("torch."), body.shape)

    def action(index: int, first: Result) -> ReceiveTensor:
        num_updates = first.get("num_updates", commands.num_updates)
        return ReceiveTensor(tensor, first.get("version"), num_updates)

    try:
        commands.in_turn(workers, action)
    except TitopoolError:
        leave(commands, workers)
        raise
    return json_response({"message": "Request received, updating named parameter"})


def leave(commands: Commands, workers: list[Worker]) -> None:
    """Ends the group everywhere: with one worker out of it, it can send nothing any more."""
    tell_all(commands, workers, LeaveGroup(None))


@blueprint.post("/reset_prefix_cache/")
def reset_prefix_cache() -> Response:
    """Ends an update, if there is one; the caches are empty afterwards."""
    commands, workers = everyone()
    commands.in_turn(workers, lambda index, first: FinishTensors())
    commands.await_step(workers, "finish", "trl", timeout_s=3 * step_timeout_s())
    return json_response({"message": "Request received, resetting prefix cache"})


@blueprint.post("/close_communicator/")
def close_communicator() -> Response:
    """Closes the communicator, if there is one."""
    commands, workers = everyone()
    commands.at_once(workers, LeaveGroup(None, finishes=True), timeout_s=3 * step_timeout_s())
    return json_response({"message": "Request received, closing communicator"})
