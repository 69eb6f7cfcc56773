"""Answers under names, on disk, which all front ends of a server share.

Who holds a name's lock may change what is known of the name. Each call of SQLite stops the event loop,
so long answers are cut into pieces and removals into batches.
"""

import functools
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from app.shared_database import SharedDatabase, used_bytes
from app.time_slices import give_way

logger = logging.getLogger(__name__)

KEEP_S = 600.0
FILE = "answers.db"
PIECE_BYTES = 64 * 1024
# Of one answer. A piece's id is its name's id times this, plus the piece's place.
MAX_PIECES = 2**20
# Names, and pieces, that one transaction removes.
BATCH = 8
# Of a file without answers.
EMPTY_PAGES = 5
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
        self._path, self._max_bytes = folder / FILE, max_bytes
        self._database = SharedDatabase(self._path, SCHEMA, "answers")
        self.locks, self._run = self._database.locks, self._database.run
        # For the facts that requests run, and for short answers. Longer ones may find no room.
        self._spare_bytes = min(PIECE_BYTES, max_bytes // 8)

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
    return used_bytes(connection, EMPTY_PAGES)
