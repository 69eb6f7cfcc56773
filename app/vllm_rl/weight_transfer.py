"""A weight update through vLLM's routes: a group, a start, lists of tensors, a finish.

Where vLLM loads each chunk into the running model, workers stage the tensors, and the finish commits
them in two phases. So a failure at any point leaves the old weights everywhere, unless the tensors
went in place (`weight_staging`): then the worker restarts.
"""

import base64
import binascii
import uuid
from collections import Counter

import msgspec
from flask import Blueprint, request
from msgspec.structs import replace

from app.call.service import current_service
from app.control.commit import commit_update
from app.control.folder import load_folder
from app.control.pool_commands import Message
from app.control.recipients import (
    check_world_size,
    commit_timeout_s,
    group_workers,
    names_restarting_workers,
    reachable_workers,
    step_timeout_s,
    whole_pool,
)
from app.pool.command_sender import CommandSender, Result, results_of
from app.pool.records import Worker
from app.route.decoding import convert, decode_body
from app.route.operation import COMMAND_ERRORS, Example, Operation
from app.vllm_rl.answers import Finished
from app.vllm_rl.bodies import (
    FOLDER_BODY,
    OBJECT,
    UPDATE_WEIGHTS_BODY,
    FinishBody,
    FolderBody,
    InitEngineBody,
    InitInfo,
    UpdateInfo,
)
from app.vllm_rl.statuses import never_repeated
from app.vllm_rl.versions import set_label
from titopool.answers.weights import Committed
from titopool.errors import InvalidRequest
from titopool.wire.commands import (
    AbortUpdate,
    AnnounceTensors,
    EndTensors,
    JoinGroup,
    LeaveGroup,
    PrepareUpdate,
    TensorInfo,
)
from titopool.wire.pool_state import PauseMode

blueprint = Blueprint("weight_transfer", __name__)

NCCL_ID_BYTES = 128


@blueprint.post("/init_weight_transfer_engine/")
@never_repeated
@Operation(
    description="Either `master_address` with `master_port`, or `nccl_unique_id_b64`.",
    errors=COMMAND_ERRORS,
    examples={
        "gloo": Example(
            "A trainer that listens on this host, workers on CPUs",
            {
                "init_info": {
                    "master_address": "127.0.0.1",
                    "master_port": 29500,
                    "rank_offset": 1,
                    "world_size": 2,
                    "backend": "gloo",
                }
            },
        )
    },
)
def init_weight_transfer_engine(body: InitEngineBody) -> Message:
    """Forms the group; the trainer, rank 0, joins during the call. Replaces an earlier group."""
    info = body.init_info
    commands, workers = whole_pool()
    _check_backend(info)
    nccl_id = _nccl_id(info)
    size = check_world_size(info.world_size, workers, info.rank_offset)
    session = f"stock-{uuid.uuid4().hex[:12]}"

    def join(index: int) -> JoinGroup:
        return JoinGroup(
            session, "vllm", info.backend, info.master_address or "",
            info.master_port or 0, info.rank_offset + index * size, info.world_size,
            nccl_id=nccl_id, calls="lists", packed=info.packed,
            packed_bytes=info.packed_buffer_size_bytes,
        )  # fmt: skip

    first, *_ = commands.send_first_then_others(workers, join, undo=LeaveGroup(session))
    # A repeated call joins the step of the first one.
    joined = first["session"]
    commands.finish_step(
        workers, "join", joined, undo=LeaveGroup(joined), timeout_s=step_timeout_s()
    )
    return Message(message="Weight transfer initialized")


def _check_backend(info: InitInfo) -> None:
    """Raises InvalidRequest for a trainer whose backend the workers do not have."""
    expected = current_service().link.facts.weight_backend
    if info.backend == expected:
        return
    reason = (
        "the workers run on CPUs, and vLLM's trainers send over NCCL only; start the server on GPUs, "
        "or send with titopool.weights_client"
        if expected == "gloo"
        else "the workers run on GPUs"
    )
    raise InvalidRequest(
        f"init_info.backend: expected {expected}, as /server_info says, got {info.backend}: {reason}",
        param="init_info",
    )


def _nccl_id(info: InitInfo) -> bytes:
    """NCCL's id; b"" if the group forms at an address.

    Raises:
        InvalidRequest: there is neither or both, or the id is not one.
    """
    has_address = info.master_address is not None and info.master_port is not None
    has_part = info.master_address is not None or info.master_port is not None
    if info.nccl_unique_id_b64 is None and has_address:
        return b""
    if info.nccl_unique_id_b64 is None or has_part:
        came = "an address and an id" if info.nccl_unique_id_b64 else "neither, or half an address"
        raise InvalidRequest(
            "init_info: expected either master_address with master_port, or nccl_unique_id_b64, got "
            f"{came}",
            param="init_info",
        )
    try:
        nccl_id = base64.b64decode(info.nccl_unique_id_b64, validate=True)
    except (binascii.Error, ValueError):
        nccl_id = b""
    if len(nccl_id) != NCCL_ID_BYTES or info.backend != "nccl":
        raise InvalidRequest(
            f"init_info.nccl_unique_id_b64: expected standard base64 of {NCCL_ID_BYTES} bytes, and the "
            f"backend nccl, got {len(nccl_id)} bytes and {info.backend}",
            param="init_info",
        )
    return nccl_id


@blueprint.post("/shutdown_weight_transfer_engine/")
@never_repeated
@Operation(errors=COMMAND_ERRORS)
def shutdown_weight_transfer_engine() -> Message:
    """Closes the group, if there is one; a 409 during an update."""
    commands, workers = reachable_workers()
    results_of(commands.gather_outcomes(workers, LeaveGroup(None, "lists")))
    return Message(message="Weight transfer shut down")


@blueprint.post("/start_weight_update/")
@never_repeated
@Operation(errors=COMMAND_ERRORS)
def start_weight_update() -> Message:
    """Opens an update; the body is ignored, as in vLLM."""
    commands, workers = group_workers(whole_pool)
    action = AnnounceTensors("lists", uuid.uuid4().hex, clock=commands.pool_state.weights.clock)
    undo = AbortUpdate(action.update_id, "another worker failed to start the update")
    commands.send_first_then_others(workers, action, undo=undo)
    return Message(message="Weight update started")


@blueprint.post("/update_weights/")
@never_repeated
@Operation(
    description="Of `path` and `weight_dir` the body has one; with `path`, `policy` is required.",
    body=(FOLDER_BODY, UPDATE_WEIGHTS_BODY),
    errors=COMMAND_ERRORS,
    examples={
        "tensors": Example(
            "Tensors",
            {
                "update_info": {
                    "names": ["lm_head.weight"],
                    "dtype_names": ["float32"],
                    "shapes": [[2048, 64]],
                }
            },
        ),
        "folder": Example(
            "A folder below weights_root", {"path": "/weights/step-7", "policy": "keep"}
        ),
    },
)
def update_weights() -> Message | Committed:
    """Receives tensors (`update_info`, vLLM's form), or loads a folder (titopool's form)."""
    body = decode_body(request.get_data(), OBJECT)
    if "update_info" in body:
        return _receive()
    return _from_folder(decode_body(request.get_data(), FOLDER_BODY))


def _from_folder(body: FolderBody) -> Committed:
    """Loads a folder that every worker can read."""
    folder = body.path or body.weight_dir
    if folder is None or (body.path and body.weight_dir):
        raise InvalidRequest(
            "path: expected a folder, either as path or as weight_dir, got "
            f"{'none' if folder is None else 'both'}",
            param="path",
        )
    # prime-rl's client sends no policy; its own server keeps requests running.
    policy: PauseMode | None = body.policy or ("keep" if body.weight_dir else None)
    if policy is None:
        raise InvalidRequest("policy: expected keep, drain or abort, got nothing", param="policy")
    return load_folder(folder, policy, body.version, cache=body.cache)


def _receive() -> Message:
    """Answers when all workers have the tensors of this call."""
    info = _update_info(decode_body(request.get_data(), OBJECT)["update_info"])
    tensors = _tensors_of(info)
    commands, workers = group_workers(whole_pool)
    action = AnnounceTensors(
        "lists", tensors=tensors, list_id=uuid.uuid4().hex, packed=info.packed,
        packed_bytes=info.packed_buffer_size_bytes,
    )  # fmt: skip
    # The trainer broadcasts to all ranks: without one of them the broadcast cannot end.
    reason = "another worker could not receive the tensors"
    undo = AbortUpdate(None, reason, "lists", leaves=True)
    first, *_ = commands.send_first_then_others(workers, action, undo=undo, undoes_refusal=True)
    undo = replace(undo, update_id=first["update_id"])
    with names_restarting_workers(commands, workers):
        commands.finish_step(
            workers, "receive", first["list_id"], undo=undo, timeout_s=step_timeout_s()
        )
    return Message(message="Weights updated")


def _update_info(value: object) -> UpdateInfo:
    if isinstance(value, list):
        raise InvalidRequest(
            "update_info: expected one object, which all ranks get, got a list with one for each "
            "rank, which this server does not support; send whole tensors to all ranks",
            param="update_info",
        )
    return convert(value, UpdateInfo, "update_info")


def _tensors_of(info: UpdateInfo) -> list[TensorInfo]:
    """The announced tensors; empty: those of the last call.

    Raises:
        InvalidRequest: the three lists have different lengths, or a name comes twice.
    """
    if len({len(info.names), len(info.dtype_names), len(info.shapes)}) != 1:
        raise InvalidRequest(
            "update_info: expected names, dtype_names and shapes of one length, got "
            f"{len(info.names)}, {len(info.dtype_names)} and {len(info.shapes)}",
            param="update_info",
        )
    (repeated, times), *_ = Counter(info.names).most_common(1) or [("", 0)]
    if times > 1:
        raise InvalidRequest(
            f"update_info.names: expected each name once, got {repeated!r} twice",
            param="update_info",
        )
    return [
        TensorInfo(name, dtype.removeprefix("torch."), shape)
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True)
    ]


@blueprint.post("/finish_weight_update/")
@never_repeated
@Operation(
    is_body_optional=True,
    errors=COMMAND_ERRORS,
    examples={"label": Example("With a label", {"weight_version": "step-7"})},
)
def finish_weight_update(body: FinishBody) -> Finished:
    """Commits the update at all workers; parts of layers wait for the rest of their layer."""
    commands, workers = group_workers(whole_pool)
    label = body.weight_version or ""
    ended = end_tensors(commands, workers, EndTensors(label=label))
    message = "Weight update finished"
    if ended.get("is_ready"):
        done = commit_update(commands, workers, PrepareUpdate(ended["update_id"], None))
        return msgspec.convert({"message": message, **msgspec.to_builtins(done)}, Finished)
    if ended.get("split_layers"):
        return Finished(message=message, waits_for=ended["split_layers"])
    if label:
        # An update without tensors changes the label only.
        set_label(label)
    return Finished(message=message)


def end_tensors(commands: CommandSender, workers: list[Worker], action: EndTensors) -> Result:
    """Ends the update that has started, at all workers; the first worker's result.

    Raises:
        Conflict: there is no such update.
        TitopoolError: the tensors do not fit the model, or a worker failed. All workers drop the
            update.
    """
    undo = AbortUpdate(None, "another worker could not end the update", "lists")
    first, *_ = commands.send_first_then_others(
        workers, action, undo=undo, undoes_refusal=True, timeout_s=commit_timeout_s()
    )
    return first
