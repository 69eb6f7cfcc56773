"""Sessions and their turns, in a file that all front ends of a server share.

A session is a tree: a turn goes on from another one, its parent, or begins with a prompt of its own.
"""

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from app.http.auth import NO_SESSION
from app.shared_database import SharedDatabase, used_bytes
from app.time_slices import give_way
from titopool.answers.sessions import Reason
from titopool.errors import QueueFull, SessionEnded, SessionNotFound, TitopoolError

FILE = "sessions.db"
ID_BYTES = 16
# Of a file without sessions.
EMPTY_PAGES = 12
# Turns without messages that are compared with a prompt.
MAX_RAW = 64
# Turns that one transaction removes.
BATCH = 8
# Links in one statement.
PIECE = 256
# How long the time of the last call may pass unnoted.
TOUCH_EVERY_S = 1.0
# Room that a request needs to begin. What it writes may be more: images, experts, the prompts of its choices.
SPARE_BYTES = 1024 * 1024
WAS_DELETED = "expected a session that is open, got one that was deleted meanwhile"
# Of `Turn`, in the order of the table: what each request of a session reads comes first.
COLUMNS = ("short", "prompt", "ids", "logprobs", "engine_prompt", "added", "experts")


class Maker(msgspec.Struct, frozen=True):
    """The key that made a session."""

    name: str
    weight: int


class ExpertRows(msgspec.Struct, frozen=True):
    """The routed experts of a turn: rows for all ids that the engine got and sampled but the last one."""

    # The index of the first row; those before are of the turns before.
    start: int
    # [rows, layers, experts of a token]
    shape: tuple[int, int, int]
    dtype: Literal["uint8", "uint16", "int32"]

    @property
    def end(self) -> int:
        return self.start + self.shape[0]


class TurnHead(msgspec.Struct, kw_only=True):
    """What is known of a turn beside its ids and messages."""

    reason: Reason
    path: str
    request_id: str
    model: str
    lora_version: int | None
    # Unix seconds.
    began_s: float
    ended_s: float
    finish_reason: str
    # [(version, index of its first token), …]
    weight_versions: list[tuple[int, int]]
    # Of all images in the prompt: digests, and offset and length in `engine_prompt`.
    images: list[bytes]
    image_ranges: list[tuple[int, int]]
    # None: the worker sent none.
    experts: ExpertRows | None
    # How the template writes the turns before in another way than they were sent; None: it does not.
    mismatch: str | None
    # What was sampled, as a message of OpenAI's chats.
    message: dict[str, Any]
    # As the engine got it.
    num_prompt: int
    num_cached: int
    num_sampled: int

    @property
    def num_ids(self) -> int:
        """Of all that the engine got and sampled."""
        return self.num_prompt + self.num_sampled


class Turn(msgspec.Struct, kw_only=True):
    """A turn of the tree."""

    parent: int | None
    head: TurnHead
    # JSON: messages that stand for the parent's turn and the request's new ones in renders of what follows.
    short: bytes = b""
    # int32: the ids after the parent's, and those that were sampled.
    prompt: bytes = b""
    ids: bytes = b""
    # float32.
    logprobs: bytes = b""
    # int32: all ids that the engine got, images expanded; empty: those that were sent.
    engine_prompt: bytes = b""
    # JSON: the request's messages after the parent's turn.
    added: bytes = b""
    # As `TurnHead.experts` says.
    experts: bytes = b""
    # As of its `TurnKeys`.
    asked: bytes | None = None
    # -1: not yet written.
    number: int = -1


class TurnKeys(NamedTuple):
    """Digests by which a turn is found, and why a branch begins."""

    # Of the conversation with the turn; None: nothing goes on from it.
    link: bytes | None
    # Of the request's messages with their context, or of its prompt.
    asked: bytes | None = None
    # Of the messages with the turn, without their context; None: the request had a prompt.
    plain: bytes | None = None
    # Of the system prompt.
    system: bytes | None = None


class Session(NamedTuple):
    """A row of `sessions`."""

    row: int
    maker: Maker
    metadata: dict[str, Any]
    made_s: float
    at_s: float


SCHEMA = (
    # digest: of the id, which opens the session. at_s: the last call, in Unix seconds.
    "CREATE TABLE sessions (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, maker BLOB NOT NULL, "
    "metadata BLOB NOT NULL, made_s REAL NOT NULL, at_s REAL NOT NULL, ended INTEGER NOT NULL, "
    "num_turns INTEGER NOT NULL)",
    "CREATE INDEX sessions_by_age ON sessions (at_s)",
    "CREATE INDEX open_sessions ON sessions (at_s) WHERE NOT ended",
    # The columns are those of `TurnKeys` and `Turn`.
    "CREATE TABLE turns (session INTEGER NOT NULL, number INTEGER NOT NULL, parent INTEGER, "
    "request_id TEXT NOT NULL, link BLOB, asked BLOB, plain BLOB, system BLOB, "
    # A file whose heads have other fields has another layout.
    f"head BLOB NOT NULL /* {' '.join(TurnHead.__struct_fields__)} */, "
    f"{', '.join(f'{name} BLOB NOT NULL' for name in COLUMNS)}, PRIMARY KEY (session, number)) WITHOUT ROWID",
    "CREATE INDEX turns_by_link ON turns (session, link)",
    "CREATE INDEX turns_by_parent ON turns (session, parent, asked)",
    "CREATE INDEX turns_by_request ON turns (session, request_id)",
    # Files as the clients sent them, once for each session; found by rowid, as they are long.
    "CREATE TABLE images (session INTEGER NOT NULL, digest BLOB NOT NULL, file BLOB NOT NULL)",
    "CREATE UNIQUE INDEX images_by_digest ON images (session, digest)",
    # Requests in flight; a process that died leaves some.
    "CREATE TABLE running (session INTEGER NOT NULL, request_id TEXT NOT NULL)",
)
FORGET = "DELETE FROM running WHERE session = ? AND request_id = ?"


class SessionStore:
    """The sessions in a folder; None: there is none, and no session."""

    def __init__(self, folder: Path | None, *, max_bytes: int, max_sessions: int, keep_s: float):
        """`keep_s`: after its last call."""
        self._path = None if folder is None else folder / FILE
        self._database = SharedDatabase(self._path, SCHEMA, "sessions") if self._path else None
        self._max_bytes, self._max_sessions, self._keep_s = max_bytes, max_sessions, keep_s

    def make(self, maker: Maker, metadata: dict[str, Any]) -> str:
        """A new session's id, 128 random bits.

        Raises:
            QueueFull: there are too many sessions, or their file is full.
            TitopoolError: the file cannot be used.
        """
        self.remove_old()
        name, now = secrets.token_hex(ID_BYTES), time.time()
        # A row of a session that is gone must not mean another one to a turn that runs.
        row = secrets.randbits(63)
        values = (row, digest_of(name), _encode(maker), _encode(metadata), now, now)
        insert = (
            "INSERT INTO sessions (id, digest, maker, metadata, made_s, at_s, ended, num_turns) "
            "VALUES (?, ?, ?, ?, ?, ?, 0, 0)"
        )

        def work(connection: sqlite3.Connection) -> sqlite3.Cursor:
            self._check_room(connection)
            count = "SELECT count(*) FROM sessions WHERE NOT ended"
            if connection.execute(count).fetchone()[0] >= self._max_sessions:
                raise QueueFull(
                    f"expected at most {self._max_sessions} sessions (max_sessions), got one more; end "
                    "those that are read, or raise the setting",
                    retry_after_s=60,
                )
            return connection.execute(insert, values)

        self._run(work)
        return name

    def find(self, name: str) -> Session:
        """The session with an id; its time without calls begins anew.

        Raises:
            SessionNotFound, SessionEnded: there is none, or it has ended.
            TitopoolError: the file cannot be used.
        """
        digest, now = digest_of(name), time.time()
        select = "SELECT id, maker, metadata, made_s, at_s, ended FROM sessions WHERE digest = ?"

        def work(connection: sqlite3.Connection) -> list[Any]:
            found = connection.execute(select, (digest,)).fetchall()
            if found and found[0][4] < now - TOUCH_EVERY_S:
                update = "UPDATE sessions SET at_s = ? WHERE digest = ? AND NOT ended AND at_s > ?"
                connection.execute(update, (now, digest, now - self._keep_s))
            return found

        found = self._run(work)
        if not found:
            raise SessionNotFound(NO_SESSION)
        row, maker, metadata, made_s, at_s, ended = found[0]
        if ended or at_s < now - self._keep_s:
            raise SessionEnded(
                f"expected a session that is open, got one that was deleted or had no call for "
                f"{self._keep_s:g} s (session_timeout_s); make one with POST /sessions"
            )
        read = msgspec.msgpack.decode(maker, type=Maker)
        return Session(row, read, _decode(metadata), made_s, at_s)

    def _check_room(self, connection: sqlite3.Connection) -> None:
        """Raises QueueFull where the file has no room for another turn."""
        used = used_bytes(connection, EMPTY_PAGES)
        if used + min(SPARE_BYTES, self._max_bytes // 8) > self._max_bytes:
            raise QueueFull(
                f"expected at most {self._max_bytes} bytes of sessions (session_bytes), got {used}; end "
                "those that are read, or raise the setting",
                retry_after_s=60,
            )

    def match(self, session: Session, links: Sequence[bytes]) -> tuple[list[Turn], int]:
        """The turns of the longest known beginning, the last one first and at most `BATCH`, without ids;
        and how many messages it has.

        Args:
            links: of the request's messages (`matching.links_of`).
        """
        places = {link: index for index, link in enumerate(links, start=1)}
        for known in _in_pieces(links):
            marks = ",".join("?" * len(known))
            select = f"SELECT DISTINCT link FROM turns WHERE session = ? AND link IN ({marks})"
            rows = self._rows(select, session.row, *known)
            if rows:
                longest = max((link for (link,) in rows), key=lambda link: places[link])
                # SQLite would look through all turns, as they are in the order of their numbers.
                select = (
                    "SELECT number, parent, head FROM turns INDEXED BY turns_by_link "
                    "WHERE session = ? AND link = ? ORDER BY number DESC LIMIT ?"
                )
                found = self._rows(select, session.row, longest, BATCH)
                return [_turn(*row) for row in found], places[longest]
        return [], 0

    def match_raw(
        self, session: Session, is_beginning: Callable[[bytes], bool]
    ) -> tuple[int, bytes] | None:
        """Of the latest turns without messages, the longest one's number and link that is a beginning."""
        select = (
            "SELECT number, link FROM turns WHERE session = ? AND plain IS NULL AND link IS NOT NULL "
            "ORDER BY number DESC LIMIT ?"
        )
        rows = self._rows(select, session.row, MAX_RAW)
        known = [(number, link) for number, link in rows if is_beginning(link)]
        # A link begins with its length.
        return max(known, key=lambda one: (one[1][:9], one[0]), default=None)

    def number_of(self, session: Session, request_id: str) -> int | None:
        """The first choice of the request with an id; None: the session has none."""
        select = "SELECT min(number) FROM turns WHERE session = ? AND request_id = ?"
        ((number,),) = self._rows(select, session.row, request_id)
        return None if number is None else int(number)

    def path_to(self, session: Session, number: int, columns: Sequence[str]) -> list[Turn]:
        """The turns from the first one to `number`, with these columns; of `engine_prompt` the last one's.

        Raises:
            SessionEnded: it was deleted meanwhile.
        """
        last = "CASE WHEN number = ?2 THEN engine_prompt ELSE x'' END"
        chosen = ", ".join(last if one == "engine_prompt" else one for one in columns)
        select = (
            "WITH RECURSIVE path (number, parent) AS ("
            "SELECT number, parent FROM turns WHERE session = ?1 AND number = ?2 UNION ALL "
            "SELECT turns.number, turns.parent FROM turns JOIN path ON turns.session = ?1 "
            "AND turns.number = path.parent) "
            f"SELECT number, parent, head, {chosen} FROM turns "
            "WHERE session = ?1 AND number IN (SELECT number FROM path) ORDER BY number"
        )
        rows = self._rows(select, session.row, number)
        if not rows or rows[0][1] is not None:
            # Turns are removed some at a time, in any order.
            raise SessionEnded(WAS_DELETED)
        return [_turn(*row, columns=columns) for row in rows]

    def turns(self, session: Session, column: str = "asked") -> list[Turn]:
        """All turns by number, with this column.

        Raises:
            SessionEnded: it was deleted meanwhile.
        """
        select = (
            f"SELECT number, parent, head, {column} FROM turns "
            "WHERE session = ? AND number >= ? ORDER BY number LIMIT ?"
        )
        found = list[Turn]()
        while rows := self._rows(select, session.row, len(found), PIECE):
            found += [_turn(*row, columns=(column,)) for row in rows]
            if found[-1].number != len(found) - 1:
                raise SessionEnded(WAS_DELETED)
            give_way()
        return found

    def images(self, session: Session, digests: Sequence[bytes]) -> list[bytes]:
        """The files of images, in order.

        Raises:
            SessionEnded: it was deleted meanwhile.
        """
        select = "SELECT file FROM images WHERE session = ? AND digest = ?"
        found = [row for one in digests for row in self._rows(select, session.row, one)]
        if len(found) != len(digests):
            raise SessionEnded(WAS_DELETED)
        return [file for (file,) in found]

    def add(
        self,
        session: Session,
        turns: Sequence[tuple[Turn, TurnKeys]],
        plain: Sequence[bytes],
        images: Mapping[bytes, bytes] | None = None,
    ) -> list[Reason]:
        """Adds the choices of one request's turn, which does not run any more, and returns why each begins a
        branch.

        Args:
            plain: of the request's messages, without their context.
            images: files by digest.

        Raises:
            SessionEnded: it was deleted meanwhile.
        """
        insert = f"INSERT INTO turns VALUES ({', '.join('?' * (9 + len(COLUMNS)))})"

        def work(connection: sqlite3.Connection) -> list[Any]:
            update = (
                "UPDATE sessions SET num_turns = num_turns + ?, at_s = ? WHERE id = ? AND NOT ended "
                "RETURNING num_turns"
            )
            found = connection.execute(update, (len(turns), time.time(), session.row)).fetchone()
            if found is None:
                return []
            for digest, file in (images or {}).items():
                keep = "INSERT OR IGNORE INTO images VALUES (?, ?, ?)"
                connection.execute(keep, (session.row, digest, file))
            first = found[0] - len(turns)
            for number, (turn, keys) in enumerate(turns, start=first):
                if number == first:
                    turn.head.reason = _reason_of(connection, session.row, turn, keys, plain)
                columns = [getattr(turn, name) for name in COLUMNS]
                connection.execute(
                    insert,
                    (session.row, number, turn.parent, turn.head.request_id, *keys,
                     _encode(turn.head), *columns),
                )  # fmt: skip
            connection.execute(FORGET, (session.row, turns[0][0].head.request_id))
            return [turn.head.reason for turn, _ in turns]

        reasons = self._run(work)
        if not reasons:
            raise SessionEnded(WAS_DELETED)
        return reasons

    def note_running(self, session: Session, request_id: str) -> None:
        """A request of the session runs, until `add` or `forget_running`.

        Raises:
            QueueFull: the file has no room for what it samples.
            TitopoolError: the file cannot be used.
        """
        insert = (
            "INSERT INTO running SELECT id, ? FROM sessions WHERE id = ? AND NOT ended RETURNING 1"
        )

        def work(connection: sqlite3.Connection) -> sqlite3.Cursor:
            self._check_room(connection)
            return connection.execute(insert, (request_id, session.row))

        if not self._run(work):
            raise SessionEnded(WAS_DELETED)

    def forget_running(self, session: Session, request_id: str) -> None:
        """A request has ended without a turn."""
        with suppress(TitopoolError):
            self._rows(FORGET, session.row, request_id)

    def end(self, session: Session) -> tuple[int, list[str]]:
        """Forgets the turns; that the session has ended is known for as long as it would be kept.

        Returns:
            How many turns it had, and the ids of its requests that run.

        Raises:
            SessionEnded: it has ended meanwhile.
        """
        update = (
            "UPDATE sessions SET ended = 1, metadata = x'80', at_s = ? WHERE id = ? AND NOT ended "
            "RETURNING num_turns"
        )
        ended = self._rows(update, time.time(), session.row)
        if not ended:
            raise SessionEnded(WAS_DELETED)
        self._remove_turns(session.row)
        delete = "DELETE FROM running WHERE session = ? RETURNING request_id"
        return ended[0][0], [name for (name,) in self._rows(delete, session.row)]

    def _remove_turns(self, row: int) -> None:
        for table, key in (("turns", "number"), ("images", "rowid")):
            delete = (
                f"DELETE FROM {table} WHERE session = ?1 AND {key} IN "
                f"(SELECT {key} FROM {table} WHERE session = ?1 LIMIT ?2) RETURNING 1"
            )
            while self._rows(delete, row, BATCH):
                give_way()

    def remove_old(self) -> None:
        """Ends sessions without a call for their time; after twice the time they are unknown."""
        now = time.time()
        overdue = (
            "SELECT id FROM sessions WHERE NOT ended AND at_s < ? "
            "AND NOT EXISTS (SELECT 1 FROM running WHERE session = id) ORDER BY at_s LIMIT ?"
        )
        update = "UPDATE sessions SET ended = 1 WHERE id = ?"
        while rows := self._rows(overdue, now - self._keep_s, BATCH):
            for (row,) in rows:
                self._rows(update, row)
                self._remove_turns(row)
            give_way()
        gone = "SELECT id FROM sessions WHERE at_s < ? ORDER BY at_s LIMIT ?"
        while rows := self._rows(gone, now - 2 * self._keep_s, BATCH):
            for (row,) in rows:
                self._remove_turns(row)
                self._rows("DELETE FROM running WHERE session = ?", row)
                self._rows("DELETE FROM sessions WHERE id = ?", row)
            give_way()

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        return self._run(lambda connection: connection.execute(statement, values))

    def totals(self) -> tuple[int, int]:
        """Open sessions, and the bytes that all take; zeros while there is no file that can be used."""
        if self._path is None or self._database is None or not self._path.exists():
            return 0, 0
        select = "SELECT count(*) FROM sessions WHERE NOT ended AND at_s >= ?"
        since_s = time.time() - self._keep_s

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            (num,) = connection.execute(select, (since_s,)).fetchone()
            return num, used_bytes(connection, EMPTY_PAGES)

        return self._database.run(work, (0, 0))

    def _run(self, work: Callable[[sqlite3.Connection], Iterable[Any]]) -> list[Any]:
        """The rows of `work` in a transaction.

        Raises:
            TitopoolError: the file cannot be used.
        """
        if self._database is None:
            raise SessionNotFound(NO_SESSION)
        rows = self._database.run(lambda connection: list(work(connection)), None)
        if rows is None:
            raise TitopoolError(
                "expected a file of sessions in run_dir that can be used, got a fault that the server's log "
                "names; make space on its disk, and try again"
            )
        return rows


def digest_of(name: str) -> bytes:
    """What the file, logs and metrics have in place of an id."""
    return blake2b(name.encode(), digest_size=16).digest()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.decode


def _turn(
    number: int, parent: int | None, head: bytes, *values: Any, columns: Sequence[str] = ()
) -> Turn:
    read = msgspec.msgpack.decode(head, type=TurnHead)
    return Turn(number=number, parent=parent, head=read, **dict(zip(columns, values, strict=True)))


def _in_pieces(links: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Links, the longest beginnings first: a statement has a bound of variables."""
    for end in range(len(links), 0, -PIECE):
        yield links[max(0, end - PIECE) : end]


def _reason_of(
    connection: sqlite3.Connection, session: int, turn: Turn, keys: TurnKeys, plain: Sequence[bytes]
) -> Reason:
    """Why a turn begins a branch; "": it goes on from a turn that nothing has followed.

    What the request itself has found (`turn.head.reason`) counts, unless it was sent before.
    """

    def has(where: str, *values: Any) -> bool:
        select = f"SELECT 1 FROM turns WHERE session = ? AND {where} LIMIT 1"
        return connection.execute(select, (session, *values)).fetchone() is not None

    if has("parent IS ? AND asked = ?", turn.parent, keys.asked):
        return "retry"
    if turn.head.reason:
        return turn.head.reason
    if turn.parent is not None:
        return "fork" if has("parent = ?", turn.parent) else ""
    if not has("1"):
        return "first"
    for known in _in_pieces(plain):
        if has(f"plain IN ({','.join('?' * len(known))})", *known):
            return "context"
    return "history" if not plain or has("system = ?", keys.system) else "system"


def ids_along(path: Sequence[Turn]) -> np.ndarray:
    """All ids up to the end of the last turn, int32."""
    return np.frombuffer(b"".join(one.prompt + one.ids for one in path), np.int32)


def engine_ids_along(path: Sequence[Turn]) -> np.ndarray:
    """As `ids_along`, with images expanded as the engine got them for the last turn."""
    last = path[-1]
    if not last.engine_prompt:
        return ids_along(path)
    return np.frombuffer(last.engine_prompt + last.ids, np.int32)
