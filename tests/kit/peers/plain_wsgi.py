"""A WSGI application without Flask, for tests of gunicorn's worker class."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Set by `/release`. gunicorn's worker has patched it.
released = threading.Event()


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """`/N` answers with N bytes, `/none` with 204, `/late` with a stream whose first piece is empty
    and whose next one comes after a request of `/release`."""
    path = environ["PATH_INFO"].strip("/")
    if path == "none":
        start_response("204 No Content", [])
        return []
    if path == "release":
        released.set()
        path = "0"
    if path == "late":
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        return late()
    start_response("200 OK", [("Content-Length", path)])
    return [b"body"[: int(path)]]


def late() -> Iterator[bytes]:
    yield b""
    assert released.wait(30)
    yield b"body"
