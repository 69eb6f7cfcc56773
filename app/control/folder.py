"""Weights from a folder that every worker can read, for the protocols that have such an update."""

import uuid

from msgspec.structs import replace

from app.control.commit import commit_update
from app.control.recipients import all_workers
from titopool.answers.weights import Committed
from titopool.wire.commands import AbortUpdate, BeginFolder, PrepareUpdate
from titopool.wire.pool_state import CacheMode, PauseMode

BEGIN_FAILED = "another worker failed to begin the update"


def load_folder(
    folder: str,
    policy: PauseMode,
    version: int | None = None,
    label: str = "",
    *,
    cache: CacheMode = "clear",
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
    clock = commands.pool_state.weights.clock
    action = BeginFolder(update_id, version, clock, folder, label, cache=cache)
    undo = AbortUpdate(update_id, BEGIN_FAILED)
    first, *_ = commands.send_first_then_others(workers, action, undo=undo)
    result = commit_update(commands, workers, PrepareUpdate(update_id, policy))
    return replace(result, ignored=first["ignored"])
