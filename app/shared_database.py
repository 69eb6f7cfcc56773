"""A SQLite file that all front ends of a server share, and locks of names in its folder.

A file that is broken, has another layout or is from before the host's start is replaced by an empty
one. While it cannot be used, work has no effect. Both are logged, and no caller sees an error. The
kernel frees the locks of a process that dies, so nothing is leased.

Each call of SQLite stops the event loop, so each must be short, and nothing waits for another process
inside of SQLite.
"""

import fcntl
import functools
import logging
import os
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import gevent

from titopool.deadline import Deadline
from titopool.errors import ConfigError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# How long another front end's transaction may last.
BUSY_S = 5.0
RETRY_S = 0.001
# How often a fault that stays is logged.
LOG_EVERY_S = 60.0
PAGE_BYTES = 4096
# No fsync: a process that dies loses nothing, and a file from before the host's start is not used.
OPTIONS = (
    f"page_size = {PAGE_BYTES}", "synchronous = OFF", "secure_delete = OFF",
    # A commit that copies more pages into the file stops the event loop for too long.
    "wal_autocheckpoint = 64",
)  # fmt: skip
# What an empty file, its log and its index take, and more.
CHECK_BYTES = 2**18
# The name whose lock is held to open the file.
OPENING = bytes(32)
# The kernel looks through all locks of a file: with 16,000 in one file, each lock took 0.3 ms.
NUM_LOCK_FILES = 32
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class SharedDatabase:
    """One front end's connection to a file."""

    def __init__(self, path: Path, schema: Sequence[str], what: str):
        """`what`: that a log line says is not kept while the file cannot be used."""
        self.locks = locks_in(path.parent)
        self._path, self._schema, self._what = path, tuple(schema), what
        self._connection: sqlite3.Connection | None = None
        # Device and inode of the connection's file, which another front end may replace.
        self._file: tuple[int, int] | None = None
        self._is_broken = False

    def run(self, work: Callable[[sqlite3.Connection], Result], otherwise: Result) -> Result:
        """The result of `work` in a transaction; `otherwise`: the file cannot be used.

        `work` lets no other greenlet run: all share the connection.
        """
        deadline, was_broken = Deadline.after(BUSY_S), False
        while True:
            try:
                connection = self._connected()
                with connection:
                    connection.execute("BEGIN")
                    return work(connection)
            except (sqlite3.Error, OSError) as error:
                is_broken = _is_broken(error)
                self._is_broken |= is_broken
                may_pass = _is_busy(error) or (is_broken and not was_broken)
                if not may_pass or deadline.has_passed:
                    _complain(self._path, self._what, error)
                    return otherwise
                was_broken |= is_broken
            gevent.sleep(RETRY_S)

    def _connected(self) -> sqlite3.Connection:
        connection = self._connection
        if connection is None or self._is_broken or self._file != _file_at(self._path):
            if not self.locks.take(OPENING):
                raise BlockingIOError("another front end opens the file")
            try:
                connection = self._open()
            finally:
                self.locks.free(OPENING)
        return connection

    def _open(self) -> sqlite3.Connection:
        if self._is_broken and self._file == _file_at(self._path):
            _discard(self._path, "it is broken")
        old, self._connection = self._connection, None
        if old is not None:
            # Not before: until then no other file has its inode.
            old.close()
        try:
            self._connection = _connect(self._path, self._schema)
        except sqlite3.DatabaseError as error:
            if not _is_broken(error):
                raise
            _discard(self._path, error)
            self._connection = _connect(self._path, self._schema)
        self._file, self._is_broken = _file_at(self._path), False
        return self._connection


def check_folder(folder: str) -> None:
    """Raises ConfigError: SQLite's write-ahead log does not work there, as on some network file systems.

    A full disk is none of its faults.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            space = Path(inner, "space")
            space.write_bytes(bytes(CHECK_BYTES))
            space.unlink()
            _connect(Path(inner, "check.db"), ("CREATE TABLE checks (id)",)).close()
    except sqlite3.Error as error:
        raise ConfigError(
            f"run_dir: expected a folder in which SQLite's write-ahead log works, got {folder}, where it "
            f"does not ({error}); choose one on a disk of this host"
        ) from error
    except OSError as error:
        logger.error("%s cannot be checked: %s", folder, error)


def used_bytes(connection: sqlite3.Connection, num_empty_pages: int) -> int:
    """What the file's pages take, without free ones and those of a file with empty tables."""
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(num_pages - num_free - num_empty_pages) * PAGE_BYTES


def _connect(path: Path, schema: Sequence[str]) -> sqlite3.Connection:
    """Opens the file, or makes it.

    Raises:
        sqlite3.Error, OSError: it is broken, has another layout, or cannot be used.
    """
    with suppress(FileExistsError):
        # SQLite's other files get the mode of this one.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        for option in OPTIONS:
            connection.execute(f"PRAGMA {option}")
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError(f"expected a write-ahead log, got journal_mode {mode}")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if num_tables == 0:
                for statement in schema:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_layout(schema)}")
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found != _layout(schema):
                error = sqlite3.DatabaseError(
                    "it has another layout, or is older than the host's start"
                )
                error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
                raise error
    except BaseException:
        connection.close()
        raise
    return connection


def _layout(schema: Sequence[str]) -> int:
    """A number of this release's tables and of this start of the host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return zlib.crc32("".join((*schema, boot)).encode()) >> 1


def _discard(path: Path, reason: object) -> None:
    logger.error("%s is replaced by an empty file, since %s", path, reason)
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _is_broken(error: Exception) -> bool:
    """Whether a file must be replaced: its bytes are damaged, or its tables are not these."""
    is_other = _code(error) == sqlite3.SQLITE_ERROR and str(error).startswith("no such")
    return is_other or _code(error) in _BROKEN


def _is_busy(error: Exception) -> bool:
    return isinstance(error, BlockingIOError) or _code(error) in _BUSY


class NameLocks:
    """Locks of names. A lock is a byte of a file."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[int, int] = {}
        self._held: set[int] = set()

    def take(self, name: bytes) -> bool:
        """Takes a name's lock, if nobody holds it, this process included."""
        place = _place(name)
        if place in self._held:
            return False
        try:
            fcntl.lockf(self._file_of(place), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except BlockingIOError:
            return False
        except OSError as error:
            # Other front ends cannot see that this one holds it.
            _complain(self._folder, "locks", error)
        self._held.add(place)
        return True

    def free(self, name: bytes) -> None:
        """Frees a lock that this process holds."""
        place = _place(name)
        self._held.remove(place)
        with suppress(OSError):
            fcntl.lockf(self._file_of(place), fcntl.LOCK_UN, 1, place)

    def _file_of(self, place: int) -> int:
        number = place % NUM_LOCK_FILES
        if number not in self._files:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path, flags = self._folder / f"locks-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._files[number] = os.open(path, flags, 0o600)
        return self._files[number]


@functools.cache
def locks_in(folder: Path) -> NameLocks:
    """The locks in a folder. To open their files twice would free them: the kernel frees a
    process's locks of a file when the process closes it anywhere."""
    return NameLocks(folder)


def _place(name: bytes) -> int:
    """A lock's byte: an offset has 63 bits."""
    return int.from_bytes(name[:8], "big") >> 1


_next_line = Deadline(0.0)


def _complain(path: Path, what: str, error: Exception) -> None:
    global _next_line
    if _next_line.has_passed:
        _next_line = Deadline.after(LOG_EVERY_S)
        logger.error("%s cannot be used; %s are not kept: %s", path, what, error)
