"""Answers as Flask sends them."""

from collections.abc import Iterable
from typing import Any

import orjson
from flask import Response

# An answer is written in pieces, each within the deadline: a slow client is not a silent one.
PIECE_BYTES = 64 * 1024


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """A short answer."""
    return Response(orjson.dumps(body), status=status, mimetype="application/json")


def respond(reply: bytes, mimetype: str) -> Response:
    """An answer that may be long."""
    response = Response(in_pieces(reply), mimetype=mimetype)
    response.content_length = len(reply)
    return response


def in_pieces(body: bytes) -> Iterable[bytes]:
    """`body` for a Response, cut where it is long."""
    if len(body) <= PIECE_BYTES:
        return (body,)
    return (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))
