"""Reads bodies: within the front end's budget, with a limit on their structure, and in time.

The decoder of JSON takes up to 24 bytes of memory for one of the body, and does not let other
greenlets run. So what a body will take is estimated from its pieces, as they arrive.
"""

import time
from typing import Any

import gevent
import numpy as np
from flask import Flask, Request, Response, has_request_context, request
from gunicorn.http.errors import ParseException

from app.http.budget import Budget, Reservation
from app.time_slices import YIELD_S
from titopool.errors import BodyTooLarge, BodyTooSlow
from titopool.settings.config import ServerConfig

PIECE_BYTES = 64 * 1024
# The slowest client that is not cut off, beyond `client_timeout_s`.
MIN_BYTES_PER_S = 32 * 1024
# Lists and objects of a body for each completion that `max_completions_per_request` allows. A prompt
# with an image has four; a chat has one, and one to three for each message.
CONTAINERS_PER_COMPLETION = 8
# Bytes of memory for one byte of a body: the body, its strings, and files and messages made of them.
BYTES_PER_BYTE = 3
# The same for one byte of a body with other characters than ASCII, whose strings take four each.
BYTES_PER_WIDE_BYTE = 6
# A number with its place in a list, after each comma; a list or an object with copies, of which few
# may be alive at once because a garbage collection visits each (0.3 s for a million).
BYTES_PER_COMMA = 44
BYTES_PER_CONTAINER = 1024
# So many in a piece count as lists and objects, wherever they stand.
FEW_BRACKETS = 16
# Bodies of this length are not counted, but taken for the worst.
SHORT_BYTES = 4096
BYTES_PER_SHORT_BYTE = 32


def init_app(app: Flask, config: ServerConfig, budget: Budget) -> None:
    """Bounds every body that a route reads with `request.get_data`."""

    class BoundedRequest(Request):
        reservation: Reservation | None = None

        def get_data(self, cache: bool = True, *args: Any, **kwargs: Any) -> Any:
            known = getattr(self, "_cached_data", None)
            if known is not None:
                return known
            self.reservation = self.reservation or Reservation(budget)
            body: Any = read_body(self, self.reservation, config)
            if cache:
                self._cached_data = body
            return body

    app.request_class = BoundedRequest

    @app.after_request
    def end(response: Response) -> Response:
        reservation, stream = current_reservation(), request.environ["wsgi.input"]
        if reservation is not None:
            response.call_on_close(reservation.release)
        response.call_on_close(lambda: _discard(stream, config.client_timeout_s))
        return response


def current_reservation() -> Reservation | None:
    """What the current request has reserved; None before its body is read."""
    return getattr(request, "reservation", None) if has_request_context() else None


def read_body(sent: Request, reservation: Reservation, config: ServerConfig) -> bytearray:
    """The whole body.

    Raises:
        QueueFull: the budget has no room for the body and what is made of it.
        BodyTooLarge: it has too many lists and objects.
        RequestEntityTooLarge: it is larger than `max_body_bytes`.
        BodyTooSlow: the client sends too slowly.
    """
    stream, length = sent.stream, sent.content_length
    reservation.check(BYTES_PER_BYTE * (length or 0))
    max_containers = CONTAINERS_PER_COMPLETION * config.max_completions_per_request
    structure, body, began_s = Structure(), bytearray(), time.monotonic()
    slow = BodyTooSlow(
        f"expected a body within {config.client_timeout_s:g} s (client_timeout_s) and a second more "
        f"for each {MIN_BYTES_PER_S} bytes, got a slower one; send it faster, or in parts"
    )
    while True:
        allowed_s = config.client_timeout_s + len(body) / MIN_BYTES_PER_S
        with gevent.Timeout(max(0.001, began_s + allowed_s - time.monotonic()), slow):
            piece = stream.read(PIECE_BYTES)
        if not piece:
            return body
        body += piece
        reservation.num_body_bytes = len(body)
        if length is not None and length <= SHORT_BYTES:
            reservation.take(BYTES_PER_SHORT_BYTE * len(piece))
            continue
        reservation.take(structure.add(piece))
        if structure.num_containers > max_containers:
            raise BodyTooLarge(
                f"expected at most {max_containers} lists and objects in a body "
                f"({CONTAINERS_PER_COMPLETION} times max_completions_per_request), got more; send "
                "several requests"
            )
        # Bytes may arrive faster than they are counted.
        gevent.sleep(YIELD_S)


def _discard(stream: Any, timeout_s: float) -> None:
    """Reads what is left of a body that was refused; gunicorn would do so without a pause."""
    if getattr(stream, "failed", False):
        # The client sends too slowly; gunicorn closes its connection.
        return
    with gevent.Timeout(timeout_s, False):
        try:
            while stream.read(PIECE_BYTES):
                gevent.sleep(YIELD_S)
        except (OSError, ParseException):
            # The client has gone, or sends another encoding.
            return


class Structure:
    """Counts lists and objects of JSON in pieces, without those that stand in strings."""

    def __init__(self) -> None:
        self.num_containers = 0
        self._is_in_string = False
        # A backslash whose escaped character is in the next piece.
        self._cut = b""

    def add(self, piece: bytes) -> int:
        """Counts the next piece; returns the bytes of memory that it will take."""
        before = self.num_containers
        per_byte = BYTES_PER_BYTE if piece.isascii() else BYTES_PER_WIDE_BYTE
        num_bytes, characters = len(piece), self._without_escapes(piece)
        num_commas = np.count_nonzero(characters == ord(","))
        is_quote = characters == ord('"')
        # In ASCII, `[` and `{` differ in one bit.
        is_opening = (characters & 0xDF) == ord("[")
        num_containers = np.count_nonzero(is_opening)
        if num_containers > FEW_BRACKETS:
            # The number of quotes so far; only whether it is odd counts.
            quotes = np.cumsum(is_quote, dtype=np.uint8)
            is_outside = (quotes & 1) == np.uint8(self._is_in_string)
            num_containers = np.count_nonzero(is_opening & is_outside)
        self.num_containers += int(num_containers)
        self._is_in_string ^= np.count_nonzero(is_quote) % 2 == 1
        return int(
            per_byte * num_bytes
            + BYTES_PER_COMMA * num_commas
            + BYTES_PER_CONTAINER * (self.num_containers - before)
        )

    def _without_escapes(self, piece: bytes) -> np.ndarray:
        """uint8: the piece without escaped quotes and backslashes."""
        piece, self._cut = self._cut + piece, b""
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
            if piece.endswith(b"\\"):
                piece, self._cut = piece[:-1], b"\\"
        return np.frombuffer(piece, np.uint8)
