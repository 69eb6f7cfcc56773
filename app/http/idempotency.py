"""The header Idempotency-Key: a request that a client repeats runs once, at whichever front end.

Front ends of a server share a store of answers (`app/http/answer_store.py`). Who holds a key's lock runs
the request; the kernel frees the lock if that process dies. Everybody else with the key waits for
the lock, and then finds the answer. If there is none, because the request failed or its front end
died, the next one runs the request. Errors are not kept: nothing was answered.

A request with a key outlives its connection for as long as `REPEAT_WITHIN_S`, so that a repeat can
join it.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import gevent
from flask import Flask, Response, g, has_request_context, request

from app.http.answer_store import NOT_KEPT, AnswerStore
from app.http.auth import current_key
from app.http.connections import check_client, client_gone, current_client, has_hung_up
from app.http.request_bodies import current_reservation
from app.http.responses import logprobs_mode, name_logprobs, respond_in_parts
from titopool.deadline import Deadline
from titopool.errors import Conflict, DeadlinePassed, InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.wire.run_dir import ANSWERS

HEADER = "Idempotency-Key"
VARIABLE = "HTTP_IDEMPOTENCY_KEY"
MAX_KEY_LENGTH = 256
# Of the answering routes, by the names of their handlers.
SUPPORTED = ("generate.generate", "chat.chat", "inference.generate")
# How long a request whose connection is lost waits for its repeat.
REPEAT_WITHIN_S = 30.0
POLL_S = 0.1
SWEEP_EVERY_S = 60.0
# How long a repeat that waits lets the time of the key's last touch pass.
TOUCH_EVERY_S = 1.0


def init_app(app: Flask, config: ServerConfig) -> None:
    """Lets the supported routes run once for each key; other routes refuse the header."""
    # At least one: the setting's 0 is for gunicorn, which sets the number.
    max_bytes = config.idempotency_bytes * max(1, config.num_front_ends)
    claims = Claims(AnswerStore(Path(config.run_dir, ANSWERS), max_bytes))

    @app.before_request
    def refuse() -> None:
        key = request.environ.get(VARIABLE)
        if key is not None and request.endpoint and request.method == "POST":
            _check(key, config)

    for name in SUPPORTED:
        app.view_functions[name] = _once(app.view_functions[name], claims, config.request_timeout_s)


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
    if has_request_context() and VARIABLE in request.environ:
        raise InvalidRequest(
            f"{HEADER}: expected a request without stream, got a stream; leave the header out",
            param=HEADER,
        )


def current_claim() -> "Claim | None":
    """The current request's hold on its key; None without a key."""
    return g.get("claim") if has_request_context() else None


def _once(handler: Any, claims: "Claims", timeout_s: float) -> Callable[[], Response]:
    @functools.wraps(handler)
    def handle() -> Response:
        response: Response
        key = request.environ.get(VARIABLE)
        if key is None:
            response = handler()
            return response
        digest = hashlib.sha256(f"{request.path.rstrip('/')}\n".encode())
        digest.update(f"{request.headers.get('Accept', '')}\n".encode())
        digest.update(request.get_data())
        # Another client's key is another name.
        name = hashlib.sha256(f"{current_key().name}\n{key}".encode()).digest()
        with claims.claimed(name, digest.digest(), Deadline.after(timeout_s)) as claim:
            if claim.answer is None:
                g.claim = claim
                response = handler()
                if response.status_code == 200:
                    answer, rest = _collect(response, claim.deadline)
                    if rest is None:
                        claim.keep(answer, response.mimetype or "", logprobs_mode())
                        whole = respond_in_parts([answer], response.mimetype or "")
                        response.response, response.content_length = whole.response, len(answer)
                    else:
                        claim.keep_nothing()
                        parts = respond_in_parts(chain([answer], rest), response.mimetype or "")
                        response.response = parts.response
                return response
            name_logprobs(claim.logprobs_mode)
            return respond_in_parts(claim.answer, claim.mimetype)

    return handle


def _collect(response: Response, deadline: Deadline) -> tuple[bytearray, Iterator[bytes] | None]:
    """The body of a response, in memory of the front end's budget.

    Returns:
        The body and None; or, where there is no room for all of it, what was made and the rest.
    """
    reservation, answer = current_reservation(), bytearray()
    parts = iter(response.iter_encoded())
    for part in parts:
        answer += part
        if reservation is not None:
            # The client is sent nothing yet.
            reservation.end_write()
            if not reservation.grow(len(part), deadline.left_s):
                return answer, parts
    return answer, None


class Claim:
    """A key whose lock this request holds."""

    def __init__(self, store: AnswerStore, name: bytes, digest: bytes, deadline: Deadline):
        self._store, self._name, self._digest = store, name, digest
        self.deadline = deadline
        self._touched_s = time.time()
        # The pieces that an earlier request with the key was answered; None: there is no answer yet.
        self.answer: list[bytes] | None = None
        self.mimetype = self.logprobs_mode = ""
        self._is_answered = self.has_ended = False

    def find(self) -> None:
        """Looks for the key's answer.

        Raises:
            Conflict: as `Claims.claimed`.
            TitopoolError: as `Reservation.wait_for`.
        """
        known = self._store.begin(self._name, self._digest)
        if known is None:
            return
        # The store keeps what it has, whatever this request's outcome is.
        self._is_answered = True
        _check_digest(known.digest, self._digest)
        if known.num_bytes == NOT_KEPT:
            raise Conflict(
                f"{HEADER}: expected to have kept the answer of this key, but it was larger than "
                "what idempotency_bytes or memory_budget_bytes left; the request ran, send it again with another key to run "
                "it again"
            )
        if (reservation := current_reservation()) is not None:
            check = partial(check_client, current_client())
            reservation.wait_for(known.num_bytes or 0, self.deadline.left_s, check)
        self.answer = self._store.read(self._name, known)
        if self.answer is None:
            self._is_answered = False
            self._store.remove([self._name])
            self._store.begin(self._name, self._digest)
            return
        self.mimetype, self.logprobs_mode = known.head.decode().split("\n")

    def is_awaited(self) -> bool:
        """Whether a repeat has come lately, or still may."""
        known = self._store.find(self._name)
        touched_s = self._touched_s if known is None else known.at_s
        return time.time() - touched_s < REPEAT_WITHIN_S

    def touch(self) -> None:
        """Begins the time in which a repeat may come."""
        self._touched_s = time.time()
        self._store.touch(self._name)

    def keep(self, answer: bytearray, mimetype: str, mode: str) -> None:
        """Keeps the answer, or the fact that there was no room for it.

        `mode`: of its log-probabilities.
        """
        self._is_answered = True
        self._store.keep(self._name, self._digest, f"{mimetype}\n{mode}".encode(), answer)

    def keep_nothing(self) -> None:
        """Keeps that the request ran, but that the front end had no room to make its answer whole."""
        self._is_answered = True
        self._store.keep_nothing(self._name, self._digest)

    def release(self) -> None:
        """Frees the lock; forgets the key if there is no answer."""
        self.has_ended = True
        try:
            if not self._is_answered:
                self._store.remove([self._name])
        finally:
            self._store.locks.free(self._name)


class Claims:
    """A front end's holds on keys."""

    def __init__(self, store: AnswerStore):
        self._store = store
        self._next_sweep = Deadline(0.0)

    @contextmanager
    def claimed(self, name: bytes, digest: bytes, deadline: Deadline) -> Iterator[Claim]:
        """Holds the lock of a key, after waiting for a request that has it.

        Raises:
            Conflict: the key was used with another request, or its answer was not kept.
            ClientGone: the client closed its connection while it waited.
            DeadlinePassed: the other request did not end in time.
        """
        if self._next_sweep.has_passed:
            self._next_sweep = Deadline.after(SWEEP_EVERY_S)
            gevent.spawn(self._store.remove_old)
        self._lock(name, digest, deadline)
        claim = Claim(self._store, name, digest, deadline)
        try:
            claim.find()
            yield claim
        finally:
            claim.release()

    def _lock(self, name: bytes, digest: bytes, deadline: Deadline) -> None:
        client = current_client()
        while not self._store.locks.take(name):
            known = self._store.find(name)
            if known is not None:
                _check_digest(known.digest, digest)
                if time.time() - known.at_s > TOUCH_EVERY_S:
                    # The request goes on for this repeat.
                    self._store.touch(name)
            if client is not None and has_hung_up(client.fileno()):
                raise client_gone()
            if deadline.has_passed:
                raise DeadlinePassed(
                    f"{HEADER}: expected the request with this key to end in time, but it has not; "
                    "send the request again"
                )
            gevent.sleep(POLL_S)


def _check_digest(known: bytes, digest: bytes) -> None:
    if known != digest:
        raise Conflict(
            f"{HEADER}: expected the request that this key was used with, got another body, path or "
            "Accept; use a new key for a new request"
        )
