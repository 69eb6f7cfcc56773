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
ADAPTERS_PREFIX = "worker-adapters-"


# Name, size in bytes and time of the last change in nanoseconds, of each file.
Files = list[tuple[str, int, int]]
# LoRA adapters by name: version, folder and what was in it.
Folders = dict[str, tuple[int, str, Files]]


class Entry(msgspec.Struct, frozen=True):
    """The last update."""

    version: int
    num_updates: int
    # Where the weights lie, "" if they came through a group and are gone.
    folder: str = ""
    files: Files = []


def files_of(folder: str) -> Files:
    """What tells a folder from one that was written over; empty if it is gone."""
    try:
        found = [(file.name, file.stat()) for file in Path(folder).iterdir() if file.is_file()]
    except OSError:
        return []
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


class Ledger:
    """One worker's file."""

    def __init__(self, run_dir: str, worker_id: str):
        self._path = Path(run_dir) / f"{FILE_PREFIX}{worker_id}" if run_dir else None
        self._adapters = Path(run_dir) / f"{ADAPTERS_PREFIX}{worker_id}" if run_dir else None

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

    def write_adapters(self, folders: Folders) -> None:
        """Replaces what is there of adapters."""
        _replace(self._adapters, folders)

    def read_adapters(self) -> Folders:
        """The adapters that the process before this one had."""
        if self._adapters is None or not self._adapters.exists():
            return {}
        return msgspec.json.decode(self._adapters.read_bytes(), type=Folders)


def _replace(path: Path | None, content: object) -> None:
    if path is not None:
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(content))
        os.replace(draft, path)


def clear_ledgers(run_dir: str) -> None:
    """A server that starts begins with its model's own weights."""
    if not run_dir:
        return
    for prefix in (FILE_PREFIX, ADAPTERS_PREFIX):
        for path in Path(run_dir).glob(prefix + "*"):
            path.unlink(missing_ok=True)
