"""What a worker knew of its pool, for the process that is started in its place.

A file in `run_dir`, written after each change. Without a `run_dir` (a worker that stands alone)
there is none: then a restarted worker hears of it from the front ends.
"""

import logging
import os
import time
from hashlib import blake2b
from pathlib import Path

import msgspec

from titopool.wire.messages import UNREADABLE
from titopool.wire.pool_state import PoolState

logger = logging.getLogger(__name__)

FILE_PREFIX = "worker-state-"


class Entry(msgspec.Struct):
    """What the file holds."""

    state: PoolState
    # Seconds since 1970, from which on the lease of a pause counts.
    written_at: float


class Ledger:
    """One worker's file."""

    def __init__(self, run_dir: str, worker_id: str):
        self._path = Path(run_dir) / f"{FILE_PREFIX}{worker_id}" if run_dir else None

    def write(self, state: PoolState) -> None:
        """Replaces what is there; a disk that is full undoes nothing."""
        if self._path is None:
            return
        draft = self._path.with_name(self._path.name + ".new")
        try:
            draft.write_bytes(msgspec.json.encode(Entry(state, time.time())))
            os.replace(draft, self._path)
        except OSError as error:
            logger.error("the pool's state cannot be noted for a restart: %s", error)

    def read(self) -> PoolState:
        """What the process before this one wrote, if anything."""
        if self._path is None:
            return PoolState()
        try:
            entry = msgspec.json.decode(self._path.read_bytes(), type=Entry)
        except FileNotFoundError:
            return PoolState()
        except (OSError, *UNREADABLE) as error:
            logger.error("%s cannot be read; the front ends may know: %s", self._path, error)
            return PoolState()
        pause, age_s = entry.state.pause, max(0.0, time.time() - entry.written_at)
        left_s = max(0.0, pause.lease_left_s - age_s)
        pause = msgspec.structs.replace(
            pause, mode=pause.mode if left_s else None, lease_left_s=left_s
        )
        return msgspec.structs.replace(entry.state, pause=pause)


def clear_ledgers(run_dir: str) -> None:
    """A server that starts begins with its model's own weights."""
    if not run_dir:
        return
    for path in Path(run_dir).glob(FILE_PREFIX + "*"):
        path.unlink(missing_ok=True)


def digest_of_files(folder: str) -> str:
    """Of the names, sizes and times of change of a folder's files; empty if it is gone."""
    try:
        found = [(file.name, file.stat()) for file in Path(folder).iterdir() if file.is_file()]
    except OSError:
        return ""
    listed = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
    return blake2b(msgspec.json.encode(listed), digest_size=16).hexdigest()
