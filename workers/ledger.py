"""Which weights a worker had, for the process that is started in its place.

A file in `run_dir`, written after each update. Without a `run_dir` (a worker that stands alone)
there is none: then only the front ends know that the pool has had updates.
"""

import logging
import os
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

FILE_PREFIX = "worker-weights-"


class Entry(msgspec.Struct, frozen=True):
    """The last update."""

    version: int
    num_updates: int
    # Where the weights lie, "" if they came through a group and are gone.
    folder: str = ""


class Ledger:
    """One worker's file."""

    def __init__(self, run_dir: str, worker_id: str):
        self._path = Path(run_dir) / f"{FILE_PREFIX}{worker_id}" if run_dir else None

    def write(self, entry: Entry) -> None:
        """Replaces what is there; a disk that is full does not undo the update."""
        if self._path is None:
            return
        draft = self._path.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(entry))
            os.replace(draft, self._path)
        except OSError as error:
            logger.error("the update cannot be noted for a restart: %s", error)

    def read(self) -> Entry | None:
        """What the process before this one wrote, if anything."""
        if self._path is None or not self._path.exists():
            return None
        return msgspec.json.decode(self._path.read_bytes(), type=Entry)


def clear_ledgers(run_dir: str) -> None:
    """A server that starts begins with its model's own weights."""
    if not run_dir:
        return
    for path in Path(run_dir).glob(FILE_PREFIX + "*"):
        path.unlink(missing_ok=True)
