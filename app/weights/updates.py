"""Weight updates through titopool's protocol, and from a folder.

The trainer (`titopool/client/weights_client.py`) begins an update, sends it, and commits it in two
phases: first every worker has received all tensors and stops generating, then all workers change.
Before the second phase, any failure leaves the old weights serving at all workers, but for those
that the update reached in place: they restart.
"""

import uuid

from flask import Blueprint
from msgspec.structs import replace

from app.control.commit import commit_update
from app.control.folder import BEGIN_FAILED
from app.control.recipients import (
    all_workers,
    check_world_size,
    group_workers,
    reachable_workers,
    restarting_workers,
    step_timeout_s,
)
from app.pool.command_sender import successful_results
from app.route.operation import COMMAND_ERRORS, Example, Operation
from app.weights.bodies import BeginBody, CloseBody, CommitBody, InitBody, WeightsAbortBody
from titopool.answers.weights import Aborted, Begun, Closed, Committed, Joined
from titopool.errors import Conflict, InvalidRequest
from titopool.wire.commands import (
    AbortUpdate,
    AnnounceTensors,
    JoinGroup,
    LeaveGroup,
    PrepareUpdate,
    TensorInfo,
)

blueprint = Blueprint("updates", __name__)

# Of examples.
UPDATE = "5f0c4c2e9a3b4f5e8d7c6b5a49382716"


@blueprint.post("/weights/init/")
@Operation(
    errors=COMMAND_ERRORS,
    examples={
        "gloo": Example(
            "A trainer that listens on this host",
            {
                "session": "trainer-1",
                "backend": "gloo",
                "host": "127.0.0.1",
                "port": 29500,
                "world_size": 2,
            },
        )
    },
)
def init(body: InitBody) -> Joined:
    """Forms the communicator; the trainer joins during the call, as rank 0."""
    commands, workers = all_workers()
    size = check_world_size(body.world_size, workers)

    def join(index: int) -> JoinGroup:
        return JoinGroup(
            body.session, "vllm", body.backend, body.host, body.port,
            1 + index * size, body.world_size, body.device_uuid,
        )  # fmt: skip

    commands.run_step(
        workers, join, "join", body.session,
        undo=LeaveGroup(body.session), timeout_s=step_timeout_s(),
    )  # fmt: skip
    return Joined(session=body.session, num_workers=len(workers))


@blueprint.post("/weights/begin/")
@Operation(
    errors=COMMAND_ERRORS,
    examples={
        "partial": Example(
            "Some of the model's tensors",
            {
                "session": "trainer-1",
                "partial": True,
                "names": ["lm_head.weight"],
                "dtypes": ["float32"],
                "shapes": [[2048, 64]],
            },
        )
    },
)
def begin(body: BeginBody) -> Begun:
    """Announces the tensors of an update; the trainer sends them after the response."""
    tensors = tensors_of(body)
    commands, workers = group_workers(all_workers, is_begin=True)
    update_id = uuid.uuid4().hex
    action = AnnounceTensors(
        "named", update_id, body.version, commands.pool_state.weights.clock, session=body.session,
        tensors=tensors, packed=body.chunk_bytes > 0, packed_bytes=body.chunk_bytes,
        is_partial=body.partial, policy=body.policy, with_checksum=body.checksum, cache=body.cache,
    )  # fmt: skip
    undo = AbortUpdate(update_id, BEGIN_FAILED)
    first, *_ = commands.send_first_then_others(workers, action, undo=undo)
    shown = {name: first[name] for name in ("version", "missing", "ignored", "kept")}
    return Begun(update=update_id, **shown)


def tensors_of(body: BeginBody) -> list[TensorInfo]:
    """The announced tensors.

    Raises:
        InvalidRequest: the three lists are empty or of different lengths.
    """
    lengths = {len(body.names), len(body.dtypes), len(body.shapes)}
    if len(lengths) != 1 or not body.names:
        raise InvalidRequest(
            "names, dtypes, shapes: expected one entry of each for every tensor, got "
            f"{len(body.names)}, {len(body.dtypes)} and {len(body.shapes)}",
            param="names",
        )
    return [
        TensorInfo(name, dtype.removeprefix("torch."), shape)
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
    ]


@blueprint.post("/weights/commit/")
@Operation(
    errors=COMMAND_ERRORS,
    examples={
        "keep": Example("Requests go on with the new weights", {"update": UPDATE, "policy": "keep"})
    },
)
def commit(body: CommitBody) -> Committed:
    """Waits until all tensors are received, and loads them into every worker's model."""
    commands, workers = group_workers(all_workers)
    checksum = body.checksum if isinstance(body.checksum, str) else None
    action = PrepareUpdate(body.update, body.policy, bool(body.checksum), checksum)
    result = commit_update(commands, workers, action)
    members = {worker.endpoint for worker in workers}
    # Those that have loaded can be in the next group. No error here: the new weights serve.
    outside = [one for one in commands.known_workers() if one.endpoint not in members]
    names = [one.heartbeat.worker_id for one in outside if one.heartbeat and one.heartbeat.facts]
    return replace(result, outside=names)


@blueprint.post("/weights/abort/")
@Operation(
    errors=COMMAND_ERRORS,
    examples={"one": Example("An update", {"update": UPDATE, "reason": "a loss of NaN"})},
)
def abort(body: WeightsAbortBody) -> Aborted:
    """Aborts an update and closes the communicator."""
    commands, workers = reachable_workers()
    outcomes = commands.gather_outcomes(workers, AbortUpdate(body.update, body.reason))
    applied_at = [one.endpoint for one in outcomes if one.result and one.result["is_applied"]]
    if applied_at:
        raise Conflict(
            f"abort: expected an update that is not applied, got {body.update}, which is applied "
            f"at {', '.join(applied_at)}; send another update"
        )
    successful_results(outcomes)
    restarting = restarting_workers(commands, workers)
    return Aborted(update=body.update, restarting=restarting)


@blueprint.post("/weights/close/")
@Operation(
    errors=COMMAND_ERRORS,
    examples={"one": Example("A group", {"session": "trainer-1"})},
)
def close(body: CloseBody) -> Closed:
    """Closes the communicator."""
    commands, workers = reachable_workers()
    successful_results(commands.gather_outcomes(workers, LeaveGroup(body.session)))
    return Closed(session=body.session)
