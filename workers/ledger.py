"""The pool's state on disk, for the process that replaces a worker.

A worker writes the file in `run_dir` after each change. A worker without a `run_dir` (one that runs
without a supervisor) has no file: after a restart, the front ends send it the pool's state.
"""

import time

import msgspec

from titopool.wire.pool_state import PoolState
from titopool.wire.run_dir import STATE, read_record, write_record


class Entry(msgspec.Struct):
    """The content of the file."""

    state: PoolState
    # Unix time in seconds; the pause's lease counts from then.
    written_at: float


class Ledger:
    """One worker's file."""

    def __init__(self, run_dir: str, worker_id: str):
        self._run_dir, self._name = run_dir, STATE.format(worker_id)

    def write(self, state: PoolState) -> None:
        """Replaces the file. A failure (a full disk) is logged only."""
        if self._run_dir:
            loss = "the pool's state could not be written for a restart"
            write_record(self._run_dir, self._name, Entry(state, time.time()), loss)

    def read(self) -> PoolState:
        """The state that the previous process wrote; an empty one, for front ends to fill, without it."""
        entry = read_record(self._run_dir, self._name, Entry, Entry(PoolState(), time.time()))
        pause, age_s = entry.state.pause, max(0.0, time.time() - entry.written_at)
        left_s = max(0.0, pause.lease_left_s - age_s)
        pause = msgspec.structs.replace(
            pause, mode=pause.mode if left_s else None, lease_left_s=left_s
        )
        return msgspec.structs.replace(entry.state, pause=pause)
