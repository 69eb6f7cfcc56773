"""Flask responses of JSON objects and of long bodies."""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from flask import Flask, Response, g

from titopool.release import RELEASE, VERSION_HEADER

# The timeout of a connection applies to each piece, so that a slow client is not a stalled one.
PIECE_BYTES = 64 * 1024

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


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """A JSON response for a short body."""
    return Response(json_line(body), status=status, mimetype="application/json")


def json_line(body: Any) -> bytes:
    """JSON with a final newline, so that a terminal shows several answers on lines of their own."""
    return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def respond(body: bytes, mimetype: str) -> Response:
    """A response that is written in pieces if `body` is long."""
    response = Response(in_pieces(body), mimetype=mimetype)
    response.content_length = len(body)
    return response


def respond_in_parts(parts: list[bytes], mimetype: str) -> Response:
    """A response of a body in parts, each of which is given up once it is written."""
    num_bytes = sum(map(len, parts))
    parts.reverse()
    response = Response(_pieces_of(parts), mimetype=mimetype)
    response.content_length = num_bytes
    return response


def _pieces_of(parts: list[bytes]) -> Iterator[bytes]:
    """Parts from the last to the first."""
    while parts:
        yield from in_pieces(parts.pop())


def in_pieces(body: bytes) -> Iterable[bytes]:
    """`body` in pieces of at most `PIECE_BYTES`."""
    if len(body) <= PIECE_BYTES:
        return (body,)
    return (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))
