"""How often the supervisor has started each worker again, and why: for /metrics.

The supervisor writes a file in `run_dir` before it starts the process, which reads the file once.
"""

import logging
import os
import signal
from pathlib import Path

import msgspec

from workers.process import EXIT_HUNG, EXIT_STOPPED, EXIT_WEIGHTS_UNKNOWN

logger = logging.getLogger(__name__)

FILE_PREFIX = "restarts-"


def reason_of(code: int, *, has_loaded: bool) -> str:
    """The class of the end of a worker process.

    Returns:
        "not_started" before it was ready, "killed" by SIGKILL (out of memory, perhaps), "signal",
        "asked" to end, "weights_unknown" after an update that failed half-way, "hung", else
        "failed".
    """
    if not has_loaded:
        return "not_started"
    if code < 0:
        return "killed" if code == -signal.SIGKILL else "signal"
    known = {EXIT_STOPPED: "asked", EXIT_WEIGHTS_UNKNOWN: "weights_unknown", EXIT_HUNG: "hung"}
    return known.get(code, "failed")


def write_restarts(run_dir: str, worker_id: str, restarts: dict[str, int]) -> None:
    """Replaces the worker's file. A failure (a full disk) is logged only."""
    path = Path(run_dir) / f"{FILE_PREFIX}{worker_id}"
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_bytes(msgspec.json.encode(restarts))
        os.replace(draft, path)
    except OSError as error:
        logger.error("/metrics lacks a restart of worker %s: %s", worker_id, error)


def read_restarts(run_dir: str, worker_id: str) -> dict[str, int]:
    """By reason; empty for a worker without a supervisor."""
    if not run_dir:
        return {}
    try:
        content = (Path(run_dir) / f"{FILE_PREFIX}{worker_id}").read_bytes()
        return msgspec.json.decode(content, type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        logger.error("the restarts of worker %s cannot be read: %s", worker_id, error)
        return {}


def clear_restarts(run_dir: str, worker_id: str = "*") -> None:
    """Removes the files of an earlier server, or of one worker."""
    if run_dir:
        for path in Path(run_dir).glob(FILE_PREFIX + worker_id):
            path.unlink(missing_ok=True)
