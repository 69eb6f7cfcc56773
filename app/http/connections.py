"""Client connections: how many a front end may hold, their timeout, and whether the client hung up.

Neither WSGI nor gunicorn does any of this: gunicorn's own reads and writes have no timeout.
"""

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gevent
from flask import Flask, Response, has_request_context, request
from gevent.monkey import get_original

from titopool.errors import ClientGone

# File descriptors for sockets to the workers, logs and libraries.
RESERVED = 512
# Connections without an open request: idle, or about to get a 429.
SPARE = 4096
CHECK_EVERY_S = 1.0
# The event mask of libev for "readable".
_READABLE = 1
# gevent's own `poll` would yield, which callbacks of its event loop must not do.
_poll = get_original("select", "poll")


def limits_within(num_descriptors: int, *, max_open_requests: int) -> tuple[int, int]:
    """The most open requests and the most connections of a process with `num_descriptors`.

    Each connection takes a descriptor. Without a free one, a process accepts no connection and
    cannot even answer 429.
    """
    available = num_descriptors - min(RESERVED, num_descriptors // 4)
    num_open = min(max_open_requests, available - available // 8)
    return num_open, min(num_open + SPARE, available)


def init_app(app: Flask, timeout_s: float) -> None:
    """Closes a connection after `timeout_s` without progress on its request or response."""

    @app.before_request
    def set_timeout() -> None:
        client = request.environ.get("gunicorn.socket")
        if client is not None:
            client.settimeout(timeout_s)

    @app.after_request
    def clear_timeout(response: Response) -> Response:
        client = request.environ.get("gunicorn.socket")
        if client is not None:
            # Between two requests, gunicorn's `keepalive` applies.
            response.call_on_close(lambda: client.settimeout(None))
        return response


def current_client() -> socket.socket | None:
    """The connection of the current request; None outside of one and under Flask's test client."""
    return request.environ.get("gunicorn.socket") if has_request_context() else None


@contextmanager
def watching(client: socket.socket | None, on_gone: Callable[[], None]) -> Iterator[None]:
    """Calls `on_gone`, in a greenlet, if `client` hangs up within the block.

    Args:
        client: the connection; None, as under Flask's test client, watches nothing.
    """
    if client is None:
        yield
        return
    watch = _Watch(client.fileno(), on_gone)
    try:
        yield
    finally:
        watch.close()


class _Watch:
    """Looks at a connection until `close`, after which no cycle keeps what `on_gone` refers to."""

    def __init__(self, descriptor: int, on_gone: Callable[[], None]):
        self._descriptor, self._on_gone = descriptor, on_gone
        loop = gevent.get_hub().loop
        self._watcher = loop.io(descriptor, _READABLE)
        self._timer = loop.timer(CHECK_EVERY_S, CHECK_EVERY_S)
        self._watcher.start(self._check)

    def _check(self) -> None:
        self._watcher.stop()
        if has_hung_up(self._descriptor):
            self._timer.stop()
            gevent.spawn(self._on_gone)
        elif not self._timer.active:
            # The client has sent bytes beyond its request: the socket stays readable, so poll it.
            self._timer.start(self._check)

    def close(self) -> None:
        for one in (self._watcher, self._timer):
            one.stop()
            one.close()


def check_client(client: socket.socket | None) -> None:
    """Raises ClientGone if the client has closed its connection; None, as under Flask's test client,
    never has."""
    if client is not None and has_hung_up(client.fileno()):
        raise client_gone()


def client_gone() -> ClientGone:
    """The error of a client that closed its connection, or that may have done so."""
    return ClientGone(
        "expected an open connection until the answer, got the end of what the client sends; keep "
        "the sending side open too"
    )


def has_hung_up(descriptor: int) -> bool:
    """Whether the peer has closed its end of a socket.

    A client that was killed and one that only ended its sending side look the same until bytes are
    sent. Before the answer these could only be interim ones, which HTTP/1.0 does not know.
    """
    poller = _poll()
    poller.register(descriptor, select.POLLRDHUP)
    return bool(poller.poll(0))
