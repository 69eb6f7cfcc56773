"""The header Idempotency-Key: a request that a client repeats runs once, at whichever front end.

Front ends of a server share a folder with one file for each key. Who holds the file's lock (flock)
runs the request; the kernel frees the lock if that process dies. Everybody else with the key waits
for the lock, and then finds the answer in the file. If there is none, because the request failed or
its front end died, the next one runs the request. Errors are not kept: nothing was answered.

A request with a key outlives its connection for as long as `REPEAT_WITHIN_S`, so that a repeat can
join it.
"""

import fcntl
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
from flask import Flask, Response, g, has_request_context, request

from app.http.auth import current_key
from app.http.connections import client_gone, current_client, has_hung_up
from app.http.responses import in_pieces, logprobs_mode, name_logprobs, respond
from app.time_slices import YIELD_S
from titopool.deadline import Deadline
from titopool.errors import Conflict, DeadlinePassed, InvalidRequest
from titopool.settings.config import ServerConfig

logger = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
MAX_KEY_LENGTH = 256
# Of the answering routes, by the names of their handlers.
SUPPORTED = ("generate.generate", "chat.chat", "inference.generate")
KEEP_S = 600.0
# How long a request whose connection is lost waits for its repeat.
REPEAT_WITHIN_S = 30.0
POLL_S = 0.1
SWEEP_EVERY_S = 60.0
FOLDER = "answers"
# A file: the request's digest, the state, a line with the MIME type and one with the mode of
# log-probabilities, the answer. The state is written last.
DIGEST_BYTES = 32
RUNNING, KEPT, NOT_KEPT = b"R", b"K", b"N"


def init_app(app: Flask, config: ServerConfig) -> None:
    """Lets the supported routes run once for each key; other routes refuse the header."""
    store = AnswerStore(config)

    @app.before_request
    def refuse() -> None:
        if HEADER in request.headers and request.endpoint and request.method == "POST":
            _check(request.headers[HEADER], config)

    for name in SUPPORTED:
        app.view_functions[name] = _once(app.view_functions[name], store, config.request_timeout_s)


def _check(key: str, config: ServerConfig) -> None:
    if request.endpoint not in SUPPORTED:
        raise InvalidRequest(
            f"{HEADER}: expected it on /generate/, /chat/ or /inference/v1/generate, got it on "
            f"{request.path}; leave the header out",
            param=HEADER,
        )
    if not (0 < len(key) <= MAX_KEY_LENGTH) or not config.run_dir:
        raise InvalidRequest(
            f"{HEADER}: expected 1 to {MAX_KEY_LENGTH} characters, and a server with a run_dir, got "
            f"{len(key)} characters and run_dir {config.run_dir!r}",
            param=HEADER,
        )


def refuse_stream() -> None:
    """Refuses a stream with a key: an answer is kept as a whole.

    Raises:
        InvalidRequest: the current request has a key.
    """
    if has_request_context() and HEADER in request.headers:
        raise InvalidRequest(
            f"{HEADER}: expected a request without stream, got a stream; leave the header out",
            param=HEADER,
        )


def current_claim() -> "Claim | None":
    """The current request's hold on its key; None without a key."""
    return g.get("claim") if has_request_context() else None


def _once(handler: Any, store: "AnswerStore", timeout_s: float) -> Callable[[], Response]:
    @functools.wraps(handler)
    def handle() -> Response:
        response: Response
        key = request.headers.get(HEADER)
        if key is None:
            response = handler()
            return response
        digest = hashlib.sha256(f"{request.path.rstrip('/')}\n".encode())
        digest.update(f"{request.headers.get('Accept', '')}\n".encode())
        digest.update(request.get_data())
        # Another client's key is another name.
        name = hashlib.sha256(f"{current_key().name}\n{key}".encode()).hexdigest()
        with store.claimed(name, digest.digest(), Deadline.after(timeout_s)) as claim:
            if claim.answer is None:
                g.claim = claim
                response = handler()
                if response.status_code == 200:
                    claim.keep(response.get_data(), response.mimetype or "", logprobs_mode())
                return response
            name_logprobs(claim.logprobs_mode)
            return respond(claim.answer, claim.mimetype)

    return handle


class Claim:
    """A key's file, whose lock this request holds."""

    def __init__(self, path: Path, descriptor: int, store: "AnswerStore"):
        self._path, self._store = path, store
        self.descriptor = descriptor
        # What an earlier request with the key was answered; None: there is no answer yet.
        self.answer: bytes | None = None
        self.mimetype = self.logprobs_mode = ""
        self.has_ended = False

    def is_awaited(self) -> bool:
        """Whether a repeat has come lately, or still may."""
        return time.time() - os.fstat(self.descriptor).st_mtime < REPEAT_WITHIN_S

    def touch(self) -> None:
        """Begins the time in which a repeat may come."""
        os.utime(self.descriptor)

    def keep(self, answer: bytes, mimetype: str, mode: str) -> None:
        """Keeps the answer, or the fact that the budget had no room for it.

        `mode`: of its log-probabilities.
        """
        head = f"{mimetype}\n{mode}\n".encode()
        is_kept = self._store.take(self._path, len(answer)) and self._write(head, answer)
        os.pwrite(self.descriptor, KEPT if is_kept else NOT_KEPT, DIGEST_BYTES)
        self.answer = answer

    def _write(self, head: bytes, answer: bytes) -> bool:
        try:
            place = DIGEST_BYTES + 1
            for piece in (head, *in_pieces(answer)):
                place += os.pwrite(self.descriptor, piece, place)
                gevent.sleep(YIELD_S)
        except OSError:
            logger.exception("%s: an answer could not be written", HEADER)
            return False
        return True

    def release(self) -> None:
        """Frees the lock; removes the file if there is no answer."""
        self.has_ended = True
        if self.answer is None:
            self._path.unlink(missing_ok=True)
        os.close(self.descriptor)


class AnswerStore:
    """The folder of keys. Its budget is for the answers of this front end."""

    def __init__(self, config: ServerConfig):
        self._folder = Path(config.run_dir, FOLDER)
        self._limit = config.idempotency_bytes
        # Size and end of each answer that this process keeps, oldest first.
        self._kept: dict[Path, tuple[int, Deadline]] = {}
        self._next_sweep = Deadline(0.0)

    @contextmanager
    def claimed(self, name: str, digest: bytes, deadline: Deadline) -> Iterator[Claim]:
        """Holds the lock of a key, after waiting for a request that has it.

        Raises:
            Conflict: the key was used with another request, or its answer was not kept.
            ClientGone: the client closed its connection while it waited.
            DeadlinePassed: the other request did not end in time.
        """
        self._sweep()
        claim = self._lock(self._folder / name, digest, deadline)
        try:
            _read(claim, digest)
            yield claim
        finally:
            claim.release()

    def _lock(self, path: Path, digest: bytes, deadline: Deadline) -> Claim:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        client = current_client()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while not _try_lock(descriptor):
                    _check_digest(os.pread(descriptor, DIGEST_BYTES, 0), digest)
                    # The request goes on for this repeat.
                    os.utime(descriptor)
                    if client is not None and has_hung_up(client.fileno()):
                        raise client_gone()
                    if deadline.has_passed:
                        raise DeadlinePassed(
                            f"{HEADER}: expected the request with this key to end in time, but it "
                            "has not; send the request again"
                        )
                    gevent.sleep(POLL_S)
                # Else the file was removed while this one waited, and another may have its name.
                if os.fstat(descriptor).st_nlink:
                    return Claim(path, descriptor, self)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def take(self, path: Path, num_bytes: int) -> bool:
        """Takes room in the budget, if there is some."""
        while self._kept and next(iter(self._kept.values()))[1].has_passed:
            del self._kept[next(iter(self._kept))]
        if sum(size for size, _ in self._kept.values()) + num_bytes > self._limit:
            return False
        self._kept.pop(path, None)
        self._kept[path] = num_bytes, Deadline.after(KEEP_S)
        return True

    def _sweep(self) -> None:
        """Removes old files, also those of front ends that have died."""
        if not self._next_sweep.has_passed:
            return
        self._next_sweep = Deadline.after(SWEEP_EVERY_S)
        for path in self._folder.glob("*"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                is_old = time.time() - os.fstat(descriptor).st_mtime > KEEP_S
                if is_old and _try_lock(descriptor):
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(claim: Claim, digest: bytes) -> None:
    """Reads what the file says; marks an empty one as this request's.

    Raises:
        Conflict: as `AnswerStore.claimed`.
    """
    found = os.pread(claim.descriptor, DIGEST_BYTES + 1, 0)
    known, state = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
    if state in (KEPT, NOT_KEPT):
        # The file stays, whatever this request's outcome is.
        claim.answer = b""
        _check_digest(known, digest)
    if state == NOT_KEPT:
        raise Conflict(
            f"{HEADER}: expected to have kept the answer of this key, but it was larger than what "
            "idempotency_bytes left; the request ran, send it again with another key to run it again"
        )
    if state == KEPT:
        rest = os.pread(claim.descriptor, os.fstat(claim.descriptor).st_size, DIGEST_BYTES + 1)
        mimetype, mode, claim.answer = rest.split(b"\n", 2)
        claim.mimetype, claim.logprobs_mode = mimetype.decode(), mode.decode()
    else:
        os.ftruncate(claim.descriptor, 0)
        os.pwrite(claim.descriptor, digest + RUNNING, 0)


def _check_digest(known: bytes, digest: bytes) -> None:
    # Shorter while the one that has the lock has not written it.
    if len(known) == DIGEST_BYTES and known != digest:
        raise Conflict(
            f"{HEADER}: expected the request that this key was used with, got another body, path or "
            "Accept; use a new key for a new request"
        )
