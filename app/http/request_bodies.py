"""Reads bodies: within the front end's budget, with a limit on their structure, and in time.

The decoder of JSON takes up to 24 bytes of memory for one of the body, and does not let other
greenlets run. So what a body will take is estimated from its pieces, as they arrive.
"""

import time
from typing import Any

import gevent
from flask import Flask, Request, Response, has_request_context, request
from gunicorn.http.errors import ParseException

from app.http.budget import Budget, Reservation
from app.json_structure import BYTES_PER_BYTE, KEYS_PER_CONTAINER, Structure
from app.time_slices import give_way
from titopool.errors import BodyTooLarge, BodyTooSlow
from titopool.settings.config import ServerConfig

PIECE_BYTES = 64 * 1024
# The slowest client that is not cut off, beyond `client_timeout_s`.
MIN_BYTES_PER_S = 32 * 1024
# Lists and objects of a body for each completion that `max_completions_per_request` allows. A prompt
# with an image has four; a chat has one, and one to three for each message.
CONTAINERS_PER_COMPLETION = 8
# Keys of objects beyond KEYS_PER_CONTAINER for each list and object: of `logit_bias`, or hostile.
MAX_MORE_KEYS = 2**18
# Bodies of this length are not counted, but taken for the worst.
SHORT_BYTES = 4096
BYTES_PER_SHORT_BYTE = 32


class _Slow(Exception):
    """Ends a read. gunicorn closes a connection after an `Exception` in a read, which gevent's own
    `Timeout` is not: what comes late would be the next request."""


def init_app(app: Flask, config: ServerConfig, budget: Budget) -> None:
    """Bounds every body that a route reads with `request.get_data`."""

    class BoundedRequest(Request):
        reservation: Reservation | None = None
        # Whether nothing of the body is left.
        is_read = False

        def get_data(self, cache: bool = True, *args: Any, **kwargs: Any) -> Any:
            known = getattr(self, "_cached_data", None)
            if known is not None:
                return known
            client = self.environ.get("gunicorn.socket")
            self.reservation = self.reservation or Reservation(budget, client)
            body: Any = read_body(self, self.reservation, config)
            self.is_read = True
            if cache:
                self._cached_data = body
            return body

    app.request_class = BoundedRequest

    @app.after_request
    def end(response: Response) -> Response:
        reservation, stream = current_reservation(), request.environ["wsgi.input"]
        if reservation is not None:
            response.call_on_close(reservation.release)
        if not getattr(request, "is_read", False):
            response.call_on_close(lambda: _discard(stream, config.client_timeout_s))
        return response


def current_reservation() -> Reservation | None:
    """What the current request has reserved; None before its body is read."""
    return getattr(request, "reservation", None) if has_request_context() else None


def read_body(sent: Request, reservation: Reservation, config: ServerConfig) -> bytearray:
    """The whole body.

    Raises:
        QueueFull: the budget has no room for the body and what is made of it.
        BodyTooLarge: it has too many lists, objects or keys.
        RequestEntityTooLarge: it is larger than `max_body_bytes`.
        BodyTooSlow: the client sends too slowly.
    """
    stream, length = sent.stream, sent.content_length
    reservation.check(BYTES_PER_BYTE * (length or 0))
    max_containers = CONTAINERS_PER_COMPLETION * config.max_completions_per_request
    structure, body, began_s = Structure(), bytearray(), time.monotonic()
    while True:
        allowed_s = config.client_timeout_s + len(body) / MIN_BYTES_PER_S
        try:
            with gevent.Timeout(max(0.001, began_s + allowed_s - time.monotonic()), _Slow):
                piece = stream.read(PIECE_BYTES)
        except _Slow:
            raise BodyTooSlow(
                f"expected a body within {config.client_timeout_s:g} s (client_timeout_s) and a second "
                f"more for each {MIN_BYTES_PER_S} bytes, got a slower one; send it faster, or in parts"
            ) from None
        if not piece:
            return body
        body += piece
        reservation.num_body_bytes = len(body)
        if length is not None and length <= SHORT_BYTES:
            reservation.take(BYTES_PER_SHORT_BYTE * len(piece))
            if len(body) == length:
                # No read finds that nothing is left.
                return body
            continue
        reservation.take(structure.add(piece))
        if structure.num_containers > max_containers:
            raise BodyTooLarge(
                f"expected at most {max_containers} lists and objects in a body "
                f"({CONTAINERS_PER_COMPLETION} times max_completions_per_request), got more; send "
                "several requests"
            )
        if structure.num_more_keys > MAX_MORE_KEYS:
            raise BodyTooLarge(
                f"expected objects with at most {KEYS_PER_CONTAINER} keys on average and "
                f"{MAX_MORE_KEYS} more in a body, got more; send smaller objects"
            )
        # Bytes may arrive faster than they are counted.
        give_way()


def _discard(stream: Any, timeout_s: float) -> None:
    """Reads what is left of a body that was refused; closes the connection of a slower client.

    gunicorn would read it without a pause, in steps of 1 KiB that each copy what has arrived, up to
    1 MiB.
    """
    if getattr(stream, "failed", False):
        # The client sends too slowly; gunicorn closes its connection.
        return
    with gevent.Timeout(timeout_s, False):
        try:
            while stream.read(PIECE_BYTES):
                give_way()
        except (OSError, ParseException):
            # The client has gone, or sends another encoding.
            pass
        return
    # gunicorn then closes the connection.
    stream.failed = True
