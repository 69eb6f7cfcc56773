"""Weight updates of TRL's `VLLMClient`: one call per parameter, without begin or commit.

The client joins the group, and sends a tensor, only after the response, so each call is answered
once every worker has accepted it. An update ends at `/reset_prefix_cache/`
(`app/vllm_rl/caches.py`), once all of the model's tensors are received, or at a generation (`workers/serving/control.py`).
"""

import re
import uuid

from flask import Blueprint

from app.call.service import current_service
from app.control.pool_commands import Message
from app.control.recipients import (
    all_workers,
    check_world_size,
    commit_timeout_s,
    group_workers,
    reachable_workers,
    step_timeout_s,
)
from app.pool.command_sender import successful_results
from app.route.operation import COMMAND_ERRORS, Example, Operation
from app.weights.bodies import TrlInitBody, TrlTensorBody
from app.weights.trl_relay import is_of_this_host, start_relay
from titopool.errors import TitopoolError
from titopool.wire.commands import AnnounceTensors, JoinGroup, LeaveGroup, TensorInfo

blueprint = Blueprint("trl_weights", __name__)

# Addresses that stand for every interface of a host.
WILDCARDS = ("0.0.0.0", "::")


@blueprint.post("/init_communicator/")
@Operation(
    errors=COMMAND_ERRORS,
    examples={
        "client": Example("TRL's client", {"host": "127.0.0.1", "port": 51216, "world_size": 2})
    },
)
def init_communicator(body: TrlInitBody) -> Message:
    """Forms the group; its ranks are those of the workers in order, and the client is last."""
    commands, workers = all_workers()
    num_ranks = check_world_size(body.world_size, workers)
    session = f"trl-{uuid.uuid4().hex[:12]}"
    first_host = host_of(workers[0].endpoint)
    listens_at = body.host
    if workers[0].endpoint.startswith("ipc://") and body.host in WILDCARDS:
        # The client names every interface, but connects to the address that the server listens at.
        listens_at = listening_address()
        first_host = first_host if listens_at in WILDCARDS else listens_at

    def join(index: int) -> JoinGroup:
        # The first worker listens; the other workers connect to its address.
        host = listens_at if index == 0 else first_host
        return JoinGroup(
            session, "trl", "auto", host, body.port, index * num_ranks, body.world_size,
            body.client_device_uuid, calls="tensors",
        )  # fmt: skip

    relay = None
    if not is_of_this_host(first_host):
        # Before any worker joins, so that nothing must be undone if this process may not listen.
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
    return Message(message="Request received, initializing communicator")


def listening_address() -> str:
    """The address that the server listens at, so that a client can reach a relay there."""
    return current_service().config.host


def host_of(endpoint: str) -> str:
    """The host at which other workers reach the worker at `endpoint`."""
    match = re.fullmatch(r"tcp://\[?(.+?)\]?:\d+", endpoint)
    return match[1] if match else "127.0.0.1"


@blueprint.post("/update_named_param/")
@Operation(
    errors=COMMAND_ERRORS,
    examples={
        "tensor": Example(
            "A tensor",
            {"name": "lm_head.weight", "dtype": "torch.float32", "shape": [2048, 64]},
        )
    },
)
def update_named_param(body: TrlTensorBody) -> Message:
    """Announces the tensor that the client sends after the response."""
    commands, workers = group_workers(all_workers)
    tensor = TensorInfo(body.name, body.dtype.removeprefix("torch."), body.shape)
    clock = commands.pool_state.weights.clock
    action = AnnounceTensors("tensors", uuid.uuid4().hex, clock=clock, tensors=[tensor])
    # The client cannot broadcast to a group that one worker has left.
    undo = LeaveGroup(None, "tensors")
    commands.send_first_then_others(
        workers, action, undo=undo, undoes_refusal=True, timeout_s=commit_timeout_s()
    )
    return Message(message="Request received, updating named parameter")


@blueprint.post("/close_communicator/")
@Operation(errors=COMMAND_ERRORS)
def close_communicator() -> Message:
    """Closes the communicator, if TRL's client has one."""
    commands, workers = reachable_workers()
    action = LeaveGroup(None, "tensors", finishes=True)
    successful_results(commands.gather_outcomes(workers, action, timeout_s=commit_timeout_s()))
    return Message(message="Request received, closing communicator")
