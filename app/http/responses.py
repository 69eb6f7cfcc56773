"""Flask responses of JSON objects and of long bodies."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import orjson
from flask import Flask, Response, g

from app.http.budget import Reservation
from app.http.request_bodies import current_reservation
from titopool.release import RELEASE, VERSION_HEADER

# The timeout of a connection applies to each piece, so that a slow client is not a stalled one.
PIECE_BYTES = 64 * 1024
# An answer of at most so many bytes is made before its head is sent, which then has its length.
WHOLE_BYTES = 256 * 1024

# Of vLLM's option `logprobs_mode`: whether log-probabilities are those of the model or of the sampler.
LOGPROBS_MODE_HEADER = "X-Titopool-Logprobs-Mode"


def init_app(app: Flask) -> None:
    """Names the release on every response, and the mode of log-probabilities where one applies."""

    @app.after_request
    def name_release(response: Response) -> Response:
        response.headers[VERSION_HEADER] = RELEASE
        if mode := logprobs_mode():
            response.headers[LOGPROBS_MODE_HEADER] = mode
        return response


def name_logprobs(mode: str) -> None:
    """Names `mode` on the response to the current request: an answer, a stream or an error."""
    g.logprobs_mode = mode


def logprobs_mode() -> str:
    """What `name_logprobs` named; "": nothing."""
    mode: str = g.get("logprobs_mode", "")
    return mode


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON response for a short body: an object or a struct."""
    return Response(msgspec.json.encode(body) + b"\n", status=status, mimetype="application/json")


def json_line(body: Any) -> bytes:
    """JSON with a final newline, so that a terminal shows several answers on lines of their own."""
    return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def respond_in_parts(parts: Iterable[bytes | bytearray], mimetype: str) -> Response:
    """A response of a body in parts, each of which is made as the client reads, and given up once it
    is written.

    A list is emptied. The length of a body that is made meanwhile is known if it is short.
    """
    begun: list[bytes | bytearray] = []
    rest: Iterator[bytes | bytearray] = iter(())
    if isinstance(parts, list):
        begun, length, is_whole = parts, sum(map(len, parts)), True
    else:
        rest, length = iter(parts), 0
        while length <= WHOLE_BYTES and (part := next(rest, None)) is not None:
            begun.append(part)
            length += len(part)
        is_whole = length <= WHOLE_BYTES
    begun.reverse()
    response = Response(_pieces_of(begun, rest, current_reservation()), mimetype=mimetype)
    if is_whole:
        response.content_length = length
    return response


def _pieces_of(
    begun: list[bytes | bytearray],
    parts: Iterator[bytes | bytearray],
    reservation: Reservation | None,
) -> Iterator[bytes]:
    """Pieces of the parts in `begun`, the last one first, and of those that follow."""
    while begun:
        yield from watched(in_pieces(begun.pop()), reservation)
    for part in parts:
        yield from watched(in_pieces(part), reservation)


def watched(pieces: Iterable[bytes], reservation: Reservation | None) -> Iterator[bytes]:
    """`pieces`, while the reservation knows since when the client has not read one."""
    for piece in pieces:
        if reservation is not None:
            reservation.begin_write()
        yield piece
        if reservation is not None:
            reservation.end_write()


def in_pieces(body: bytes | bytearray) -> Iterable[bytes]:
    """`body` in pieces of at most `PIECE_BYTES`."""
    starts = range(0, len(body), PIECE_BYTES) or (0,)
    return (bytes(body[start : start + PIECE_BYTES]) for start in starts)
