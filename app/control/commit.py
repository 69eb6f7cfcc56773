"""The two-phase commit of a weight update: all workers prepare it, then all workers apply it."""

import logging
import time
from collections.abc import Sequence

import msgspec

from app.control.recipients import names_restarting_workers, step_timeout_s
from app.pool.command_sender import CommandSender, Result
from app.pool.records import Worker
from titopool.answers.weights import Committed
from titopool.errors import Conflict, DeadlinePassed, WeightUpdateFailed
from titopool.wire.commands import AbortUpdate, ApplyUpdate, PrepareUpdate

logger = logging.getLogger(__name__)


def commit_update(
    commands: CommandSender, workers: Sequence[Worker], action: PrepareUpdate
) -> Committed:
    """Prepares an update at all workers, then applies it.

    A worker that is lost after the first phase restarts without the update, and gets no jobs until
    it has the update or a later one. The result lists such workers as `lost`.

    Raises:
        TitopoolError: a worker failed to prepare, and all workers keep the old weights, but for
            those that got the new ones in place and restart; or no worker applied the update.
    """
    start = time.monotonic()
    prepared = _prepare(commands, workers, action)
    prepared_at = time.monotonic()
    applied, lost = _apply(commands, workers, action.update_id)
    version, previous = applied[0]["version"], applied[0]["previous_version"]
    if version <= previous:
        # As a trainer does that starts again from an earlier checkpoint.
        logger.warning(
            "version %d of the weights follows version %d: min_weight_version and weight_versions "
            "do not tell them apart", version, previous,
        )  # fmt: skip
    found = {
        **applied[0],
        **prepared[0],
        "prepare_s": round(prepared_at - start, 4),
        "apply_s": round(time.monotonic() - prepared_at, 4),
        # Workers have room or not, each for itself.
        "cache": "clear" if any(one["cache"] == "clear" for one in applied) else "keep",
        "lost": lost,
    }
    return msgspec.convert(found, Committed)


def _prepare(
    commands: CommandSender, workers: Sequence[Worker], action: PrepareUpdate
) -> list[Result]:
    undo = AbortUpdate(action.update_id, "another worker failed to prepare the update")
    with names_restarting_workers(commands, workers):
        results = commands.run_step(
            workers, action, "prepare", action.update_id, undo=undo, timeout_s=step_timeout_s(),
        )  # fmt: skip
    if len({one.get("checksum") for one in results}) > 1:
        commands.gather_outcomes(workers, undo)
        raise WeightUpdateFailed(
            "checksum: expected the same tensors at all workers, got different ones; send the "
            "update again"
        )
    return results


def _apply(
    commands: CommandSender, workers: Sequence[Worker], update_id: str
) -> tuple[list[Result], list[dict[str, str]]]:
    """The results of the workers that applied the update, and the errors of the others."""
    # Sent to all workers at once: `PrepareUpdate` has already refused a second trainer.
    accepted = commands.gather_outcomes(workers, ApplyUpdate(update_id))
    refused = {one.endpoint: one.error for one in accepted if one.error is not None}
    outcomes = commands.await_step(
        [one for one in workers if one.endpoint not in refused],
        "apply", update_id, timeout_s=step_timeout_s(),
    )  # fmt: skip
    errors = refused | {one.endpoint: one.error for one in outcomes if one.error is not None}
    lost = [{"endpoint": endpoint, "error": error.message} for endpoint, error in errors.items()]
    results = [one.result for one in outcomes if one.result is not None]
    if results:
        return results, lost
    error = next(iter(errors.values()))
    if isinstance(error, Conflict | DeadlinePassed):
        raise error
    raise WeightUpdateFailed(
        "no worker has the new weights, and workers that restart lose the old weights: "
        f"{error.message}; send a complete update"
    )
