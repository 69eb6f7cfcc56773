"""The series of one process, in a file that the other processes of the server read.

The file is mapped into memory: what a process has counted is there even if it is killed, and no process
waits for another one. prometheus_client's multiprocess mode is not used. It does not reserve the space of
its files, so that a full disk ends the process that counts. The files of ended processes stay: after 200,
a read takes 0.5 s. If they are merged with its own functions, sums fall and reads fail while one is
merged. And each front end reads all of them every 2 s for the page: 10 ms against 2 ms here.

Layout, in the machine's byte order: the number of bytes in use (8 bytes), then entries. An entry has
the length of its key and its number of values (4 bytes each), the key, zeros up to a multiple of 8
bytes, and its values as float64.
"""

import logging
import mmap
import os
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from titopool.wire.run_dir import COUNTS, replace_file

logger = logging.getLogger(__name__)

# Of one process: all routes with many errors take a quarter.
FILE_BYTES = 2**20
FILE_PREFIX = "front-end-"
# The sums of processes that have ended.
ENDED_FILE = "ended"
# Names in it: who reads meanwhile may have seen these files too.
NUM_NAMES = 256
_USED, _ENTRY = struct.Struct("Q"), struct.Struct("II")

# Values by key.
Counts = dict[bytes, list[float]]


class SharedFile:
    """Keys with values, which this process changes and others read."""

    def __init__(self, run_dir: str):
        """Without `run_dir`, or without space in it, only this process reads the values."""
        self.path: Path | None = None
        self._map = mmap.mmap(-1, FILE_BYTES)
        if run_dir:
            self._map_file(Path(run_dir, COUNTS))
        self._view = memoryview(self._map)
        self._used = _USED.size
        _USED.pack_into(self._map, 0, self._used)

    def _map_file(self, folder: Path) -> None:
        path = folder / f"{FILE_PREFIX}{os.getpid()}-{time.time_ns()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            with path.open("xb+") as file:
                # Space on the disk now: without it, a write to the map would end the process.
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
                self._map = mmap.mmap(file.fileno(), FILE_BYTES)
            self.path = path
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            logger.error("/metrics lacks this front end's counts at the others: %s", error)

    def reserve(self, key: bytes, num_values: int) -> "memoryview[float]":
        """The values of a new key, all 0, as float64; nobody reads them if the file is full."""
        begin = self._used + _ENTRY.size + _padded(len(key))
        end = begin + 8 * num_values
        if end > FILE_BYTES:
            return memoryview(bytearray(8 * num_values)).cast("d")
        _ENTRY.pack_into(self._map, self._used, len(key), num_values)
        self._map[self._used + _ENTRY.size : self._used + _ENTRY.size + len(key)] = key
        self._used = end
        # Last: a reader sees whole entries only.
        _USED.pack_into(self._map, 0, end)
        return self._view[begin:end].cast("d")

    def read(self) -> Counts:
        """This process's own values."""
        return parse(self._map[: self._used])


def _padded(length: int) -> int:
    return (length + 7) // 8 * 8


def parse(data: bytes) -> Counts:
    """The entries of a file's bytes; those that are cut off are left out."""
    found: Counts = {}
    if len(data) < _USED.size:
        return found
    position, (used,) = _USED.size, _USED.unpack_from(data)
    used = min(used, len(data))
    while position + _ENTRY.size <= used:
        key_length, num_values = _ENTRY.unpack_from(data, position)
        begin = position + _ENTRY.size
        values = begin + _padded(key_length)
        position = values + 8 * num_values
        if position <= used:
            found[data[begin : begin + key_length]] = list(
                struct.unpack_from(f"{num_values}d", data, values)
            )
    return found


def sum_of(all_counts: Iterable[Counts]) -> Counts:
    """The sums by key."""
    total: Counts = {}
    for counts in all_counts:
        for key, values in counts.items():
            known = total.get(key)
            total[key] = (
                values if known is None else list(map(sum, zip(known, values, strict=False)))
            )
    return total


class Ended(msgspec.Struct):
    """The content of `ENDED_FILE`."""

    # Files whose counts are in `counts`, the last ones.
    names: list[str]
    counts: Counts


def read_others(run_dir: str, own: Path | None) -> Counts:
    """The sums of all other processes of the server, also of those that have ended."""
    folder, found = Path(run_dir, COUNTS), {}
    for path in folder.glob(FILE_PREFIX + "*"):
        if path != own:
            with suppress(OSError), path.open("rb") as file:
                (used,) = _USED.unpack(file.read(_USED.size).ljust(_USED.size, b"\0"))
                file.seek(0)
                found[path.name] = parse(file.read(used))
    # After the files: who ends meanwhile is named here.
    ended = _read_ended(folder)
    living = (counts for name, counts in found.items() if name not in ended.names)
    return sum_of([ended.counts, *living])


def _read_ended(folder: Path) -> Ended:
    try:
        return msgspec.msgpack.decode((folder / ENDED_FILE).read_bytes(), type=Ended)
    except FileNotFoundError:
        return Ended([], {})
    except (OSError, msgspec.MsgspecError) as error:
        logger.error("the counts of front ends that have ended cannot be read: %s", error)
        return Ended([], {})


def add_ended(run_dir: str, pid: int) -> None:
    """Adds the counts of a process that has ended to those of earlier ones, in the master."""
    folder = Path(run_dir, COUNTS)
    for path in folder.glob(f"{FILE_PREFIX}{pid}-*"):
        try:
            ended = _read_ended(folder)
            counts = sum_of([ended.counts, parse(path.read_bytes())])
            names = [*ended.names, path.name][-NUM_NAMES:]
            replace_file(folder / ENDED_FILE, msgspec.msgpack.encode(Ended(names, counts)))
            path.unlink()
        except OSError as error:
            # The file stays, and counts as that of a living process.
            logger.error("the counts of a front end that has ended stay apart: %s", error)


def forget_all(run_dir: str) -> None:
    """Removes the counts of an earlier server in the same `run_dir`."""
    for path in (Path(run_dir, COUNTS)).glob("*"):
        path.unlink(missing_ok=True)
