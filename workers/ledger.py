"""The pool's state on disk, for the process that replaces a worker.

A worker writes the file in `run_dir` after each change. A worker without a `run_dir` (one that runs
without a supervisor) has no file: after a restart, the front ends send it the pool's state.
"""

import logging
import os
import time
from pathlib import Path

import msgspec

from titopool.wire.messages import UNREADABLE
from titopool.wire.pool_state import PoolState

logger = logging.getLogger(__name__)

FILE_PREFIX = "worker-state-"


class Entry(msgspec.Struct):
    """The content of the file."""

    state: PoolState
    # Unix time in seconds; the pause's lease counts from then.
    written_at: float


class Ledger:
    """One worker's file."""

    def __init__(self, run_dir: str, worker_id: str):
        self._path = Path(run_dir) / f"{FILE_PREFIX}{worker_id}" if run_dir else None

    def write(self, state: PoolState) -> None:
        """Replaces the file. A failure (a full disk) is logged only."""
        if self._path is None:
            return
        draft = self._path.with_name(self._path.name + ".new")
        try:
            draft.write_bytes(msgspec.json.encode(Entry(state, time.time())))
            os.replace(draft, self._path)
        except OSError as error:
            logger.error("the pool's state could not be written for a restart: %s", error)

    def read(self) -> PoolState:
        """The state that the previous process wrote; an empty one without a readable file."""
        if self._path is None:
            return PoolState()
        try:
            entry = msgspec.json.decode(self._path.read_bytes(), type=Entry)
        except FileNotFoundError:
            return PoolState()
        except (OSError, *UNREADABLE) as error:
            logger.error(
                "%s cannot be read; waiting for the front ends to send the pool's state: %s",
                self._path,
                error,
            )
            return PoolState()
        pause, age_s = entry.state.pause, max(0.0, time.time() - entry.written_at)
        left_s = max(0.0, pause.lease_left_s - age_s)
        pause = msgspec.structs.replace(
            pause, mode=pause.mode if left_s else None, lease_left_s=left_s
        )
        return msgspec.structs.replace(entry.state, pause=pause)


def clear_ledgers(run_dir: str, worker_id: str = "*") -> None:
    """Removes the files of an earlier server, which begins with the initial weights, or of one worker."""
    if not run_dir:
        return
    for path in Path(run_dir).glob(FILE_PREFIX + worker_id):
        path.unlink(missing_ok=True)
