"""Weight updates through our own protocol or from a folder, and pauses.

An update is begun, sent by the trainer (`titopool/weights_client.py`) and committed in two steps:
every worker first has all tensors and stands, then all of them change. Before the second step,
whatever fails anywhere leaves the old weights serving everywhere.
"""

import time
import uuid
from collections.abc import Sequence

from flask import Blueprint, Response, request

from app.commands import Commands, Result
from app.health import json_response
from app.pool import Worker
from app.schemas import decode_body
from app.service import current_service
from app.weight_bodies import (
    ABORT_BODY,
    BEGIN_BODY,
    CLOSE_BODY,
    COMMIT_BODY,
    FOLDER_BODY,
    INIT_BODY,
    PAUSE_BODY,
    BeginBody,
)
from titopool.commands import (
    AbortUpdate,
    ApplyUpdate,
    BeginFolder,
    BeginUpdate,
    GetStatus,
    JoinGroup,
    LeaveGroup,
    Pause,
    Policy,
    PrepareUpdate,
    Resume,
    TensorInfo,
)
from titopool.errors import InvalidRequest, TitopoolError, WeightUpdateFailed

blueprint = Blueprint("weights", __name__)


def everyone() -> tuple[Commands, list[Worker]]:
    """The commands of this process, and all workers in order.

    Raises:
        NoReadyWorker: one is missing.
    """
    link = current_service().link
    link.meet()
    return link.commands, link.commands.members()


def step_timeout_s() -> float:
    """The deadline that the workers hold for each step."""
    return current_service().config.weight_update_timeout_s


def check_world_size(given: int, workers: Sequence[Worker]) -> int:
    """The processes of one worker; the group must have those of all, and the trainer.

    Raises:
        InvalidRequest: the trainer counts otherwise.
    """
    size = current_service().link.facts.world_size
    expected = size * len(workers) + 1
    if given != expected:
        raise InvalidRequest(
            f"world_size: expected {expected} ({len(workers)} workers with {size} processes each, "
            f"and the trainer), got {given}; ask /get_world_size",
            param="world_size",
        )
    return size


@blueprint.post("/weights/init/")
def init() -> Response:
    """Forms the group; answers when all are in it, so the trainer joins meanwhile."""
    body = decode_body(request.get_data(), INIT_BODY)
    commands, workers = everyone()
    size = check_world_size(body.world_size, workers)

    def join(index: int, _: Result) -> JoinGroup:
        return JoinGroup(
            body.session, "titopool", body.backend, body.host, body.port,
            1 + index * size, body.world_size, body.device_uuid,
        )  # fmt: skip

    undo = LeaveGroup(body.session)
    commands.in_turn(workers, join, undo=undo)
    try:
        commands.await_step(workers, "join", body.session, timeout_s=step_timeout_s())
    except TitopoolError:
        commands.tell_all(workers, undo)
        raise
    return json_response({"session": body.session, "num_workers": len(workers)})


@blueprint.post("/weights/begin/")
def begin() -> Response:
    """Checks what is to come; the answer's `update` names it in commit and abort."""
    body = decode_body(request.get_data(), BEGIN_BODY)
    tensors = tensors_of(body)
    commands, workers = everyone()
    update_id = uuid.uuid4().hex

    def action(index: int, first: Result) -> BeginUpdate:
        return BeginUpdate(
            body.session, update_id,
            first.get("version", body.version), first.get("num_updates", commands.num_updates),
            tensors, body.bucket_bytes, body.partial,
        )  # fmt: skip

    undo = AbortUpdate(update_id, "it could not begin at every worker")
    first, *_ = commands.in_turn(workers, action, undo=undo)
    return json_response(
        {
            "update": update_id,
            "version": first["version"],
            "missing": first["missing"],
            "ignored": first["ignored"],
            "kept": first["kept"],
        }
    )


def tensors_of(body: BeginBody) -> list[TensorInfo]:
    """The announced tensors.

    Raises:
        InvalidRequest: the three lists are not equally long, or empty.
    """
    lengths = {len(body.names), len(body.dtypes), len(body.shapes)}
    if len(lengths) != 1 or not body.names:
        raise InvalidRequest(
            "names, dtypes, shapes: expected one of each for every tensor, got "
            f"{len(body.names)}, {len(body.dtypes)} and {len(body.shapes)}",
            param="names",
        )
    return [
        TensorInfo(name, dtype.removeprefix("torch."), shape)
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
    ]


@blueprint.post("/weights/commit/")
def commit() -> Response:
    """Waits for the tensors and puts them into every worker's model."""
    body = decode_body(request.get_data(), COMMIT_BODY)
    commands, workers = everyone()
    checksum = body.checksum if isinstance(body.checksum, str) else None
    action = PrepareUpdate(body.update, body.policy, bool(body.checksum), checksum)
    return json_response(commit_everywhere(commands, workers, action))


def commit_everywhere(
    commands: Commands, workers: Sequence[Worker], action: PrepareUpdate
) -> Result:
    """Both steps of a commit.

    Raises:
        TitopoolError: the old weights serve; or, if the message says so, a worker restarts.
    """
    began, update_id = time.monotonic(), action.update_id
    undo = AbortUpdate(update_id, "another worker failed to prepare it")
    commands.in_turn(workers, lambda index, first: action, undo=undo)
    try:
        results = commands.await_step(workers, "prepare", update_id, timeout_s=step_timeout_s())
        prepared = time.monotonic()
        checksums = {one.get("checksum") for one in results}
        if len(checksums) > 1:
            raise WeightUpdateFailed("checksum: the workers have received different tensors")
    except TitopoolError:
        commands.tell_all(workers, undo)
        raise
    commands.in_turn(workers, lambda index, first: ApplyUpdate(update_id))
    first, *_ = commands.await_step(workers, "apply", update_id, timeout_s=step_timeout_s())
    applied = time.monotonic()
    return {
        **first,
        **results[0],
        "prepare_s": round(prepared - began, 4),
        "apply_s": round(applied - prepared, 4),
    }


@blueprint.post("/weights/abort/")
def abort() -> Response:
    """Drops an update; the communicator is closed with it."""
    body = decode_body(request.get_data(), ABORT_BODY)
    commands, workers = everyone()
    commands.in_turn(workers, lambda index, first: AbortUpdate(body.update, body.reason))
    return json_response({"update": body.update})


@blueprint.post("/weights/close/")
def close() -> Response:
    """Closes the communicator."""
    body = decode_body(request.get_data(), CLOSE_BODY)
    commands, workers = everyone()
    commands.in_turn(workers, lambda index, first: LeaveGroup(body.session))
    return json_response({"session": body.session})


@blueprint.get("/weights/")
def status() -> Response:
    """What each worker's state is."""
    commands, workers = everyone()
    return json_response({"workers": commands.at_once(workers, GetStatus())})


@blueprint.post("/update_weights/")
def update_weights() -> Response:
    """Takes the weights of a folder that every worker can read."""
    body = decode_body(request.get_data(), FOLDER_BODY)
    folder = body.path or body.weight_dir
    if folder is None or (body.path and body.weight_dir):
        raise InvalidRequest("path: expected a folder, as path or as weight_dir", param="path")
    # prime-rl's client names no policy; its own server lets requests go on.
    policy: Policy | None = body.policy or ("keep" if body.weight_dir else None)
    if policy is None:
        raise InvalidRequest("policy: expected keep, drain or abort, got nothing", param="policy")
    commands, workers = everyone()
    update_id = uuid.uuid4().hex

    def action(index: int, first: Result) -> BeginFolder:
        version = first.get("version", body.version)
        num_updates = first.get("num_updates", commands.num_updates)
        return BeginFolder(update_id, version, num_updates, folder)

    undo = AbortUpdate(update_id, "it could not begin at every worker")
    first, *_ = commands.in_turn(workers, action, undo=undo)
    result = commit_everywhere(commands, workers, PrepareUpdate(update_id, policy))
    return json_response({**result, "ignored": first["ignored"]})


@blueprint.post("/pause/")
def pause() -> Response:
    """Stops generation at every worker for at most `lease_s`; said again, it renews the lease."""
    body = decode_body(request.get_data(), PAUSE_BODY)
    commands, workers = everyone()
    # A drain takes as long as the longest request.
    timeout_s = current_service().config.request_timeout_s
    commands.at_once(workers, Pause(body.mode, body.lease_s), timeout_s=timeout_s)
    return json_response({"is_paused": True, "lease_s": body.lease_s})


@blueprint.post("/resume/")
def resume() -> Response:
    """Ends a pause."""
    commands, workers = everyone()
    results = commands.at_once(workers, Resume())
    return json_response({"is_paused": False, "was_paused": any(r["was_paused"] for r in results)})


@blueprint.get("/is_paused/")
def is_paused() -> Response:
    """Whether any worker is paused by a client, and for how long at most."""
    commands, workers = everyone()
    leases = [one["lease_left_s"] for one in commands.at_once(workers, GetStatus())]
    left_s = max((lease for lease in leases if lease is not None), default=None)
    return json_response({"is_paused": left_s is not None, "lease_left_s": left_s})
