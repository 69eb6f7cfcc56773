"""Answers under names, on disk, which all front ends of a server share.

A folder has one SQLite file with the answers, and files whose bytes are locks of names. Who holds a
name's lock may change what is known of the name. The kernel frees the locks of a process that dies,
so nothing is leased. A file that is broken, has another layout or is from before the host's start is
replaced by an empty one. While a file cannot be used, nothing is kept. Both are logged, and no
caller sees an error.

Each call of SQLite stops the event loop. So each is short: long answers are cut into pieces,
removals into batches, and nothing waits for another process inside of SQLite.
"""

import fcntl
import functools
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import gevent

from app.time_slices import give_way
from titopool.deadline import Deadline

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

KEEP_S = 600.0
FILE = "answers.db"
PIECE_BYTES = 64 * 1024
# Of one answer. A piece's id is its name's id times this, plus the piece's place.
MAX_PIECES = 2**20
# Names, and pieces, that one transaction removes.
BATCH = 8
# How long another front end's transaction may last.
BUSY_S = 5.0
RETRY_S = 0.001
# How often a fault that stays is logged.
LOG_EVERY_S = 60.0
PAGE_BYTES = 4096
# Of a file without answers.
EMPTY_PAGES = 5
# No fsync: a process that dies loses nothing, and a file from before the host's start is not used.
OPTIONS = (
    f"page_size = {PAGE_BYTES}", "journal_mode = WAL", "synchronous = OFF", "secure_delete = OFF",
    # A commit that copies more pages into the file stops the event loop for too long.
    "wal_autocheckpoint = 64",
)  # fmt: skip
SCHEMA = (
    # digest: of the request. at_s: the last change or touch, in Unix seconds. num_bytes: of the
    # answer, NULL while there is none. crc: of the answer; SQLite has none.
    "CREATE TABLE names (id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, digest BLOB NOT NULL, "
    "at_s REAL NOT NULL, num_bytes INTEGER, crc INTEGER, head BLOB)",
    "CREATE INDEX names_by_age ON names (at_s)",
    "CREATE TABLE pieces (id INTEGER PRIMARY KEY, piece BLOB NOT NULL)",
)
# The `num_bytes` of an answer that had no room.
NOT_KEPT = -1
# The name whose lock is held to open the file.
OPENING = bytes(32)
# The kernel looks through all locks of a file: with 16,000 in one file, each lock took 0.3 ms.
NUM_LOCK_FILES = 32
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


class Entry(NamedTuple):
    """What is known of a name: the columns of `names`."""

    digest: bytes
    at_s: float
    num_bytes: int | None
    crc: int
    head: bytes


class AnswerStore:
    """The answers in a folder."""

    def __init__(self, folder: Path, max_bytes: int):
        """`max_bytes`: of the file, beyond an empty one's."""
        self.locks = locks_in(folder)
        self._path, self._max_bytes = folder / FILE, max_bytes
        # For the facts that requests run, and for short answers. Longer ones may find no room.
        self._spare_bytes = min(PIECE_BYTES, max_bytes // 8)
        self._connection: sqlite3.Connection | None = None
        # Device and inode of the connection's file, which another front end may replace.
        self._file: tuple[int, int] | None = None
        self._is_broken = False

    def find(self, name: bytes) -> Entry | None:
        """What is known of a name."""
        return self._run(lambda connection: _find(connection, name), None)

    def touch(self, name: bytes) -> None:
        """Makes now the time of the name's last change."""
        values, update = (time.time(), name), "UPDATE names SET at_s = ? WHERE name = ?"
        self._run(lambda connection: connection.execute(update, values), None)

    def begin(self, name: bytes, digest: bytes) -> Entry | None:
        """The answer that a name has; None: the name's request begins, and has none yet.

        Needs the name's lock, as `keep` and `remove` do.
        """
        begin = functools.partial(self._begin, name, digest)
        otherwise: tuple[Entry | None, bool] = None, True
        known, has_room = self._run(begin, otherwise)
        if known is not None and known.num_bytes is None:
            # Of a process that died.
            self.remove([name])
            known, has_room = self._run(begin, otherwise)
        if known is None and not has_room:
            # A repeat comes soon, if it comes: the newest names are worth more.
            self.remove_before(time.time(), until=lambda: self._has_room(self._spare_bytes))
        return known

    def _begin(
        self, name: bytes, digest: bytes, connection: sqlite3.Connection
    ) -> tuple[Entry | None, bool]:
        """What is known of a name; else begins it. And whether the file has room."""
        known = _find(connection, name)
        if known is None:
            _insert(connection, name, digest, None)
        return known, _used_bytes(connection) + self._spare_bytes <= self._max_bytes

    def keep(self, name: bytes, digest: bytes, head: bytes, answer: bytes | bytearray) -> None:
        """Keeps an answer, or the fact that there was no room for it."""
        if not self._write_pieces(name, head, answer):
            self.keep_nothing(name, digest)

    def keep_nothing(self, name: bytes, digest: bytes) -> None:
        """Keeps that there was no room for an answer; needs the name's lock."""
        self.remove([name])
        self._run(lambda connection: _insert(connection, name, digest, NOT_KEPT), None)

    def _write_pieces(self, name: bytes, head: bytes, answer: bytes | bytearray) -> bool:
        num_bytes, crc = len(answer), 0
        if num_bytes > PIECE_BYTES and not self._has_room(num_bytes):
            return False
        for place, start in enumerate(range(0, max(1, num_bytes), PIECE_BYTES)):
            piece = memoryview(answer)[start : start + PIECE_BYTES]
            crc = zlib.crc32(piece, crc)
            is_last = start + len(piece) == num_bytes
            entry = (num_bytes, crc, head, time.time(), name) if is_last else None
            insert = functools.partial(self._insert_piece, name, place, piece, entry)
            if not self._run(insert, False):
                return False
            if not is_last:
                give_way()
        return True

    def _insert_piece(
        self,
        name: bytes,
        place: int,
        piece: memoryview,
        entry: tuple[int | float | bytes, ...] | None,
        connection: sqlite3.Connection,
    ) -> bool:
        """Writes a piece, after the last one the entry too; False: no room, or no such name."""
        if _used_bytes(connection) + len(piece) > self._max_bytes:
            return False
        if entry is not None:
            connection.execute(
                "UPDATE names SET num_bytes = ?, crc = ?, head = ?, at_s = ? WHERE name = ?", entry
            )
        insert = "INSERT INTO pieces SELECT id * ? + ?, ? FROM names WHERE name = ?"
        return connection.execute(insert, (MAX_PIECES, place, piece, name)).rowcount == 1

    def read(self, name: bytes, entry: Entry) -> list[bytes] | None:
        """The pieces of an answer; None: they are not what was written."""
        pieces: list[bytes] = []
        left, crc = entry.num_bytes or 0, 0
        while left > 0:
            place = len(pieces)
            piece = self._run(lambda connection: _piece(connection, name, place), b"")  # noqa: B023
            if not piece:
                break
            pieces.append(piece)
            left, crc = left - len(piece), zlib.crc32(piece, crc)
            if left > 0:
                give_way()
        if (left, crc) != (0, entry.crc):
            logger.error("%s: an answer is not what was written; it is forgotten", self._path)
            return None
        return pieces

    def remove(self, names: Sequence[bytes], before_s: float = float("inf")) -> None:
        """Forgets names and their answers, but for those that have changed since `before_s`."""
        while names:
            remove = functools.partial(_remove, names=names, before_s=before_s)
            names = names[self._run(remove, len(names)) :]
            if names:
                give_way()

    def remove_old(self) -> None:
        """Forgets the names that nobody may ask for any more."""
        self.remove_before(time.time() - KEEP_S)

    def remove_before(self, at_s: float, until: Callable[[], bool] = bool) -> None:
        """Forgets names that have not changed since `at_s`, oldest first, `until` it is enough.

        A name whose lock somebody holds stays.
        """
        last, none = (0.0, 0), list[tuple[float, int, bytes]]()
        while not until():
            found = self._run(functools.partial(_names_between, last, at_s), none)
            if not found:
                return
            last = found[-1][:2]
            taken = [name for *_, name in found if self.locks.take(name)]
            try:
                # Another front end may have removed one, and have begun with it again.
                self.remove(taken, before_s=at_s)
            finally:
                for name in taken:
                    self.locks.free(name)
            give_way()

    def _has_room(self, num_bytes: int) -> bool:
        return self._run(_used_bytes, self._max_bytes) + num_bytes <= self._max_bytes

    def _run(self, work: Callable[[sqlite3.Connection], Result], otherwise: Result) -> Result:
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
                is_broken = _code(error) in _BROKEN
                self._is_broken |= is_broken
                may_pass = _is_busy(error) or (is_broken and not was_broken)
                if not may_pass or deadline.has_passed:
                    _complain(self._path, error)
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
            self._connection = _connect(self._path)
        except sqlite3.DatabaseError as error:
            if _code(error) not in _BROKEN:
                raise
            _discard(self._path, error)
            self._connection = _connect(self._path)
        self._file, self._is_broken = _file_at(self._path), False
        return self._connection


def _find(connection: sqlite3.Connection, name: bytes) -> Entry | None:
    select = "SELECT digest, at_s, num_bytes, crc, head FROM names WHERE name = ?"
    row = connection.execute(select, (name,)).fetchone()
    return row and Entry(*row)


def _insert(
    connection: sqlite3.Connection, name: bytes, digest: bytes, num_bytes: int | None
) -> None:
    insert = "INSERT OR REPLACE INTO names (name, digest, at_s, num_bytes) VALUES (?, ?, ?, ?)"
    connection.execute(insert, (name, digest, time.time(), num_bytes))


def _piece(connection: sqlite3.Connection, name: bytes, place: int) -> bytes:
    select = "SELECT piece FROM pieces WHERE id = (SELECT id * ? + ? FROM names WHERE name = ?)"
    row = connection.execute(select, (MAX_PIECES, place, name)).fetchone()
    return row[0] if row else b""


def _names_between(
    last: tuple[float, int], before_s: float, connection: sqlite3.Connection
) -> list[tuple[float, int, bytes]]:
    """The oldest names after the `last` one: time, id, name."""
    return connection.execute(
        "SELECT at_s, id, name FROM names WHERE (at_s, id) > (?, ?) AND at_s < ? "
        "ORDER BY at_s, id LIMIT ?",
        (*last, before_s, BATCH),
    ).fetchall()


def _remove(connection: sqlite3.Connection, names: Sequence[bytes], before_s: float) -> int:
    """Removes as much as one transaction may; the number of names that are gone."""
    left = BATCH
    for index, name in enumerate(names):
        select = "SELECT id FROM names WHERE name = ? AND at_s < ?"
        row = connection.execute(select, (name, before_s)).fetchone()
        if row is None:
            continue
        first = row[0] * MAX_PIECES
        left -= connection.execute(
            "DELETE FROM pieces WHERE id IN "
            "(SELECT id FROM pieces WHERE id >= ? AND id < ? LIMIT ?)",
            (first, first + MAX_PIECES, left),
        ).rowcount
        if left == 0:
            # No process that comes later takes the rest for an answer.
            connection.execute("UPDATE names SET num_bytes = NULL WHERE id = ?", row)
            return index
        connection.execute("DELETE FROM names WHERE id = ?", row)
    return len(names)


def _used_bytes(connection: sqlite3.Connection) -> int:
    """What the file's pages take, without free ones and those of an empty file."""
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(num_pages - num_free - EMPTY_PAGES) * PAGE_BYTES


def _connect(path: Path) -> sqlite3.Connection:
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
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if num_tables == 0:
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_layout()}")
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found != _layout():
                error = sqlite3.DatabaseError(
                    "it has another layout, or is older than the host's start"
                )
                error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
                raise error
    except BaseException:
        connection.close()
        raise
    return connection


def _layout() -> int:
    """A number of this release's tables and of this start of the host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return zlib.crc32("".join((*SCHEMA, boot)).encode()) >> 1


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
            _complain(self._folder, error)
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


def _complain(path: Path, error: Exception) -> None:
    global _next_line
    if _next_line.has_passed:
        _next_line = Deadline.after(LOG_EVERY_S)
        logger.error("%s cannot be used; answers are not kept: %s", path, error)
