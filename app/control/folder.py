"""Weights from a folder that every worker can read, for the protocols that have such an update."""

import uuid

import msgspec
from msgspec.structs import replace

from app.control.commit import commit_update
from app.control.recipients import all_workers
from app.pool.command_sender import Result
from app.route.fields import Version
from titopool.answers.weights import Committed
from titopool.errors import InvalidRequest
from titopool.wire.commands import AbortUpdate, BeginFolder, PrepareUpdate
from titopool.wire.pool_state import PauseMode

BEGIN_FAILED = "another worker failed to begin the update"


class FolderBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /update_weights`; `weight_dir` is prime-rl's name for `path`."""

    path: str | None = None
    weight_dir: str | None = None
    version: Version | None = None
    policy: PauseMode | None = None


FOLDER_BODY = msgspec.json.Decoder(FolderBody)


def update_from_folder(body: FolderBody) -> Committed:
    """`POST /update_weights` without `update_info`: loads a folder that every worker can read."""
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
    return load_folder(folder, policy, body.version)


def load_folder(
    folder: str, policy: PauseMode, version: int | None = None, label: str = ""
) -> Committed:
    """Loads a folder below `weights_root` into every worker.

    Args:
        version: None: one more than the version that serves.
        label: the trainer's own name for the version; "": the version.

    Raises:
        TitopoolError: as `commit_update`; or the folder is not there or does not fit the model.
    """
    commands, workers = all_workers()
    update_id = uuid.uuid4().hex

    def action(index: int, first: Result) -> BeginFolder:
        clock = first.get("clock", commands.pool_state.weights.clock)
        return BeginFolder(
            update_id, first.get("version", version), clock, folder, label, first.get("files", "")
        )

    undo = AbortUpdate(update_id, BEGIN_FAILED)
    first, *_ = commands.send_first_then_others(workers, action, undo=undo)
    result = commit_update(commands, workers, PrepareUpdate(update_id, policy))
    return replace(result, ignored=first["ignored"])
