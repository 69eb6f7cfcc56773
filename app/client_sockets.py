"""Deadlines on a client's connection: gunicorn's own reads and writes have none."""

from collections.abc import Iterable

from flask import Flask, Response, request

# An answer is written in pieces, each within the deadline: a slow client is not a silent one.
PIECE_BYTES = 64 * 1024


def init_app(app: Flask, timeout_s: float) -> None:
    """Ends a connection whose client neither sends the rest of its request nor takes its answer."""

    @app.before_request
    def set_deadline() -> None:
        client = request.environ.get("gunicorn.socket")
        if client is not None:
            client.settimeout(timeout_s)

    @app.after_request
    def end_deadline(response: Response) -> Response:
        client = request.environ.get("gunicorn.socket")
        if client is not None:
            # Between two requests, gunicorn's `keepalive` counts.
            response.call_on_close(lambda: client.settimeout(None))
        return response


def in_pieces(body: bytes) -> Iterable[bytes]:
    """`body` for a Response, cut where it is long."""
    if len(body) <= PIECE_BYTES:
        return (body,)
    return (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))
