"""Weight updates through our own protocol or from a folder, and pauses.

An update is begun, sent by the trainer (`titopool/client/weights_client.py`) and committed in two steps:
every worker first has all tensors and stands, then all of them change. Before the second step,
whatever fails anywhere leaves the old weights serving everywhere.
"""

import time
import uuid
from collections.abc import Sequence

from flask import Blueprint, Response, request

from app.http.responses import json_response
from app.pool.command_sender import CommandSender, Outcome, Result
from app.pool.link import Link
from app.pool.records import Worker
from app.schemas.decoding import decode_body
from app.schemas.weights import (
    ABORT_BODY,
    ACCEPT_BODY,
    BEGIN_BODY,
    CLOSE_BODY,
    COMMIT_BODY,
    FOLDER_BODY,
    INIT_BODY,
    PAUSE_BODY,
    BeginBody,
)
from app.service import current_service
from titopool.errors import (
    Conflict,
    DeadlinePassed,
    InvalidRequest,
    NoReadyWorker,
    TitopoolError,
    WeightUpdateFailed,
)
from titopool.wire.commands import (
    AbortUpdate,
    AcceptInitialWeights,
    ApplyUpdate,
    BeginFolder,
    BeginUpdate,
    GetStatus,
    JoinGroup,
    LeaveGroup,
    Pause,
    PauseMode,
    PrepareUpdate,
    Resume,
    TensorInfo,
)
from titopool.wire.pool_state import next_clock

blueprint = Blueprint("weights", __name__)


def all_workers() -> tuple[CommandSender, list[Worker]]:
    """The commands of this process, and all workers in order.

    Raises:
        NoReadyWorker: one is missing.
    """
    link = current_service().link
    link.wait_for_heartbeats()
    return link.commands, link.commands.all_workers()


def reachable_workers() -> tuple[CommandSender, list[Worker]]:
    """The commands of this process, and the workers that answer now, in order.

    What they are told reaches the others when those can be reached again.

    Raises:
        NoReadyWorker: none answers.
    """
    link = current_service().link
    link.wait_for_heartbeats()
    return link.commands, link.commands.reachable_workers()


def check_any(outcomes: Sequence[Outcome]) -> None:
    """Raises the first error if no worker has done what it was told."""
    if all(one.error is not None for one in outcomes):
        check_all(outcomes)


def check_all(outcomes: Sequence[Outcome]) -> None:
    """Raises the first error, if a worker has not done what it was told."""
    for one in outcomes:
        if one.error is not None:
            raise one.error


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
    commands, workers = all_workers()
    size = check_world_size(body.world_size, workers)

    def join(index: int, _: Result) -> JoinGroup:
        return JoinGroup(
            body.session, "titopool", body.backend, body.host, body.port,
            1 + index * size, body.world_size, body.device_uuid,
        )  # fmt: skip

    undo = LeaveGroup(body.session)
    commands.send_first_then_others(workers, join, undo=undo)
    outcomes = commands.await_step(workers, "join", body.session, timeout_s=step_timeout_s())
    try:
        check_all(outcomes)
    except TitopoolError:
        commands.gather_outcomes(workers, undo)
        raise
    return json_response({"session": body.session, "num_workers": len(workers)})


@blueprint.post("/weights/begin/")
def begin() -> Response:
    """Checks what is to come; the answer's `update` names it in commit and abort."""
    body = decode_body(request.get_data(), BEGIN_BODY)
    tensors = tensors_of(body)
    commands, workers = all_workers()
    update_id = uuid.uuid4().hex

    def action(index: int, first: Result) -> BeginUpdate:
        return BeginUpdate(
            body.session, update_id,
            first.get("version", body.version), first.get("clock", commands.pool_state.weights.clock),
            tensors, body.bucket_bytes, body.partial,
        )  # fmt: skip

    undo = AbortUpdate(update_id, "it could not begin at every worker")
    first, *_ = commands.send_first_then_others(workers, action, undo=undo)
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
    commands, workers = all_workers()
    checksum = body.checksum if isinstance(body.checksum, str) else None
    action = PrepareUpdate(body.update, body.policy, bool(body.checksum), checksum)
    return json_response(commit_everywhere(commands, workers, action))


def commit_everywhere(
    commands: CommandSender, workers: Sequence[Worker], action: PrepareUpdate
) -> Result:
    """Both steps of a commit.

    Once all workers have prepared the update it is applied by every worker that lives: one that is
    lost in between comes back without it and gets no jobs (`lost` in the answer).

    Raises:
        TitopoolError: the old weights serve, or no worker does.
    """
    began = time.monotonic()
    prepared_results = _prepare(commands, workers, action)
    prepared = time.monotonic()
    applied_results, lost = _apply(commands, workers, action.update_id)
    return {
        **applied_results[0],
        **prepared_results[0],
        "prepare_s": round(prepared - began, 4),
        "apply_s": round(time.monotonic() - prepared, 4),
        "lost": lost,
    }


def _prepare(
    commands: CommandSender, workers: Sequence[Worker], action: PrepareUpdate
) -> list[Result]:
    undo = AbortUpdate(action.update_id, "another worker failed to prepare it")
    commands.send_first_then_others(workers, lambda index, first: action, undo=undo)
    outcomes = commands.await_step(workers, "prepare", action.update_id, timeout_s=step_timeout_s())
    try:
        check_all(outcomes)
        results = [one.result for one in outcomes if one.result is not None]
        if len({one.get("checksum") for one in results}) > 1:
            raise WeightUpdateFailed("checksum: the workers have received different tensors")
    except TitopoolError:
        commands.gather_outcomes(workers, undo)
        raise
    return results


def _apply(
    commands: CommandSender, workers: Sequence[Worker], update_id: str
) -> tuple[list[Result], list[dict[str, str]]]:
    """What came of it at the workers that have applied it, and the others with their errors."""
    # To all at once: which trainer's update it is was settled at the first step.
    accepted = commands.gather_outcomes(workers, ApplyUpdate(update_id))
    refused = {one.endpoint: one.error for one in accepted if one.error is not None}
    outcomes = commands.await_step(
        [one for one in workers if one.endpoint not in refused],
        "apply", update_id, timeout_s=step_timeout_s(),
    )  # fmt: skip
    errors = refused | {one.endpoint: one.error for one in outcomes if one.error is not None}
    lost = [{"endpoint": place, "error": error.message} for place, error in errors.items()]
    results = [one.result for one in outcomes if one.result is not None]
    if results:
        return results, lost
    error = next(iter(errors.values()))
    if isinstance(error, Conflict | DeadlinePassed):
        raise error
    raise WeightUpdateFailed(
        f"no worker has the new weights, and those that restart lack the old ones: {error.message}"
    )


@blueprint.post("/weights/abort/")
def abort() -> Response:
    """Drops an update; the communicator is closed with it."""
    body = decode_body(request.get_data(), ABORT_BODY)
    commands, workers = reachable_workers()
    outcomes = commands.gather_outcomes(workers, AbortUpdate(body.update, body.reason))
    serving = [one.endpoint for one in outcomes if one.result and one.result["is_applied"]]
    if serving:
        raise Conflict(
            f"abort: expected an update that is not applied; update {body.update} is, at "
            f"{', '.join(serving)}"
        )
    check_any(outcomes)
    return json_response({"update": body.update})


@blueprint.post("/weights/close/")
def close() -> Response:
    """Closes the communicator."""
    body = decode_body(request.get_data(), CLOSE_BODY)
    commands, workers = reachable_workers()
    check_any(commands.gather_outcomes(workers, LeaveGroup(body.session)))
    return json_response({"session": body.session})


@blueprint.get("/weights/")
def status() -> Response:
    """What each worker's state is; of one that does not answer, that it does not."""
    link = current_service().link
    link.wait_for_heartbeats()
    found = {view.endpoint: {"worker": None, "state": view.phase} for view in link.workers}
    for one in _statuses(link):
        found[one.endpoint] = one.result or found[one.endpoint]
    return json_response(
        {"workers": [{**one, "endpoint": endpoint} for endpoint, one in found.items()]}
    )


def _statuses(link: Link) -> list[Outcome]:
    """The state of each worker that answers; none if none does."""
    try:
        return link.commands.gather_outcomes(link.commands.reachable_workers(), GetStatus())
    except NoReadyWorker:
        return []


@blueprint.post("/weights/accept/")
def accept() -> Response:
    """Lets the pool go on with the model's own weights when those of the last update are lost."""
    decode_body(request.get_data() or b"{}", ACCEPT_BODY)
    commands, workers = reachable_workers()
    for one in commands.gather_outcomes(workers, GetStatus()):
        if one.result and not one.result["waits_for_weights"]:
            raise Conflict(
                f"accept: expected weights that every worker has lost; the worker at {one.endpoint} "
                f"serves version {one.result['weight_version']}, and the others get it by a "
                "complete update"
            )
    update_id = f"own-{uuid.uuid4().hex}"
    action = AcceptInitialWeights(update_id, next_clock(commands.pool_state.weights.clock))
    outcomes = commands.gather_outcomes(workers, action)
    check_any(outcomes)
    restarting = [one.endpoint for one in outcomes if one.result and one.result["restarts"]]
    return json_response({"weight_version": 0, "restarting": restarting})


@blueprint.post("/update_weights/")
def update_weights() -> Response:
    """Takes the weights of a folder that every worker can read."""
    body = decode_body(request.get_data(), FOLDER_BODY)
    folder = body.path or body.weight_dir
    if folder is None or (body.path and body.weight_dir):
        raise InvalidRequest("path: expected a folder, as path or as weight_dir", param="path")
    # prime-rl's client names no policy; its own server lets requests go on.
    policy: PauseMode | None = body.policy or ("keep" if body.weight_dir else None)
    if policy is None:
        raise InvalidRequest("policy: expected keep, drain or abort, got nothing", param="policy")
    commands, workers = all_workers()
    update_id = uuid.uuid4().hex

    def action(index: int, first: Result) -> BeginFolder:
        version = first.get("version", body.version)
        clock = first.get("clock", commands.pool_state.weights.clock)
        return BeginFolder(update_id, version, clock, folder)

    undo = AbortUpdate(update_id, "it could not begin at every worker")
    first, *_ = commands.send_first_then_others(workers, action, undo=undo)
    result = commit_everywhere(commands, workers, PrepareUpdate(update_id, policy))
    return json_response({**result, "ignored": first["ignored"]})


@blueprint.post("/pause/")
def pause() -> Response:
    """Stops generation at every worker for at most `lease_s`; said again, it renews the lease."""
    body = decode_body(request.get_data(), PAUSE_BODY)
    commands, workers = reachable_workers()
    # A drain takes as long as the longest request.
    timeout_s = current_service().config.request_timeout_s
    action = Pause(body.mode, body.lease_s, next_clock(commands.pool_state.pause.clock))
    outcomes = commands.gather_outcomes(workers, action, timeout_s=timeout_s)
    # One that loads, or was lost meanwhile, hears of the pause before it gets jobs again.
    check_all([one for one in outcomes if not one.was_unreachable])
    check_any(outcomes)
    return json_response({"is_paused": True, "lease_s": body.lease_s})


@blueprint.post("/resume/")
def resume() -> Response:
    """Ends a pause."""
    commands, workers = reachable_workers()
    outcomes = commands.gather_outcomes(
        workers, Resume(next_clock(commands.pool_state.pause.clock))
    )
    check_any(outcomes)
    was_paused = any(one.result["was_paused"] for one in outcomes if one.result)
    return json_response({"is_paused": False, "was_paused": was_paused})


@blueprint.get("/is_paused/")
def is_paused() -> Response:
    """Whether any worker is paused by a client, and for how long at most."""
    link = current_service().link
    link.wait_for_heartbeats()
    answers = [one.result["lease_left_s"] for one in _statuses(link) if one.result]
    # What a front end has heard may be older than what they say now.
    leases = [lease for lease in answers or [link.pause_left_s] if lease is not None]
    left_s = max(leases, default=None)
    return json_response({"is_paused": left_s is not None, "lease_left_s": left_s})
