"""Weight updates as TRL's client does them: one call for each parameter, none to begin or end.

The client joins, and sends, only after it has its answer, so a call is answered when every worker
has accepted it. An update ends at `/reset_prefix_cache/`, or when all of the model's tensors are
there, or at a generation (`workers/serving/control.py`).
"""

import re
import uuid

from flask import Blueprint, Response, request

from app.http.responses import json_response
from app.pool.command_sender import STEP_MARGIN_S, Result
from app.routes.weights.trl_relay import is_of_this_host, start_relay
from app.routes.weights.weights import (
    all_workers,
    check_all,
    check_any,
    check_world_size,
    reachable_workers,
    step_timeout_s,
)
from app.schemas.decoding import decode_body
from app.schemas.weights import TRL_INIT_BODY, TRL_TENSOR_BODY
from app.service import current_service
from titopool.errors import InvalidRequest, TitopoolError
from titopool.wire.commands import (
    FinishTensors,
    JoinGroup,
    LeaveGroup,
    ReceiveTensor,
    TensorInfo,
)

blueprint = Blueprint("trl_weights", __name__)

# Every interface of a host.
WILDCARDS = ("0.0.0.0", "::")


@blueprint.post("/init_communicator/")
def init_communicator() -> Response:
    """The group's ranks are the workers' processes in order, and the client last."""
    body = decode_body(request.get_data(), TRL_INIT_BODY)
    commands, workers = all_workers()
    size = check_world_size(body.world_size, workers)
    session = f"trl-{uuid.uuid4().hex[:12]}"
    first_host = host_of(workers[0].endpoint)
    listens_at = body.host
    if workers[0].endpoint.startswith("ipc://") and body.host in WILDCARDS:
        # The client asks for every interface; the server's own is where it looks.
        listens_at = listening_address()
        first_host = first_host if listens_at in WILDCARDS else listens_at

    def join(index: int, _: Result) -> JoinGroup:
        # The others look for the first worker at its address.
        host = listens_at if index == 0 else first_host
        return JoinGroup(
            session, "trl", "auto", host, body.port, index * size, body.world_size,
            body.client_device_uuid,
        )  # fmt: skip

    relay = None
    if not is_of_this_host(first_host):
        # Before any worker joins: where this process may not listen, nothing has happened yet.
        relay = start_relay(
            body.port, first_host, lease_s=step_timeout_s(), listen_at=listening_address()
        )
    try:
        commands.send_first_then_others(
            workers, join, undo=LeaveGroup(session), timeout_s=commit_timeout_s()
        )
    except TitopoolError:
        if relay is not None:
            relay.close()
        raise
    return json_response({"message": "Request received, initializing communicator"})


def listening_address() -> str:
    """Where this server listens: a client that reaches it there finds the relay too."""
    return current_service().config.host


def commit_timeout_s() -> float:
    """How long a worker may take to accept a call before which it ends the update before."""
    return 3 * step_timeout_s() + STEP_MARGIN_S


def host_of(endpoint: str) -> str:
    """The host of a worker as other workers reach it."""
    found = re.fullmatch(r"tcp://\[?(.+?)\]?:\d+", endpoint)
    return found[1] if found else "127.0.0.1"


@blueprint.post("/update_named_param/")
def update_named_param() -> Response:
    """The client sends this tensor next."""
    body = decode_body(request.get_data(), TRL_TENSOR_BODY)
    commands, workers = all_workers()
    update_id = uuid.uuid4().hex
    tensor = TensorInfo(body.name, body.dtype.removeprefix("torch."), body.shape)

    def action(index: int, first: Result) -> ReceiveTensor:
        clock = first.get("clock", commands.pool_state.weights.clock)
        return ReceiveTensor(tensor, first.get("update_id", update_id), first.get("version"), clock)

    # With one worker out of the group, it can send nothing any more.
    undo = LeaveGroup(None)
    try:
        commands.send_first_then_others(workers, action, undo=undo, timeout_s=commit_timeout_s())
    except InvalidRequest:
        # The first has dropped the update.
        commands.gather_outcomes(workers, undo)
        raise
    return json_response({"message": "Request received, updating named parameter"})


@blueprint.post("/reset_prefix_cache/")
def reset_prefix_cache() -> Response:
    """Ends an update, if there is one; the caches are empty afterwards."""
    commands, workers = all_workers()
    commands.send_first_then_others(
        workers, lambda index, first: FinishTensors(), timeout_s=commit_timeout_s()
    )
    check_all(commands.await_step(workers, "finish", "trl", timeout_s=3 * step_timeout_s()))
    return json_response({"message": "Request received, resetting prefix cache"})


@blueprint.post("/close_communicator/")
def close_communicator() -> Response:
    """Closes the communicator, if there is one."""
    commands, workers = reachable_workers()
    check_any(
        commands.gather_outcomes(
            workers, LeaveGroup(None, finishes=True), timeout_s=commit_timeout_s()
        )
    )
    return json_response({"message": "Request received, closing communicator"})
