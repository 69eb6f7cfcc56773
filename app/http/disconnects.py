"""Notices clients that close their connection while they wait. WSGI does not tell."""

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gevent
from gevent.monkey import get_original

from app.pool.worker_socket import READ

LOOK_EVERY_S = 1.0
# gevent's own would wait, which its event loop must not.
_poll = get_original("select", "poll")


@contextmanager
def watching(client: socket.socket | None, on_gone: Callable[[], None]) -> Iterator[None]:
    """Calls `on_gone`, in a greenlet, if `client` hangs up within the block.

    Args:
        client: the connection; None, where the WSGI server shows none, watches nothing.
    """
    if client is None:
        yield
        return
    descriptor = client.fileno()
    loop = gevent.get_hub().loop
    watcher, timer = loop.io(descriptor, READ), loop.timer(LOOK_EVERY_S, LOOK_EVERY_S)

    def look() -> None:
        watcher.stop()
        if has_hung_up(descriptor):
            timer.stop()
            gevent.spawn(on_gone)
        elif not timer.active:
            # The client has sent more than its request, which stays readable.
            timer.start(look)

    watcher.start(look)
    try:
        yield
    finally:
        for one in (watcher, timer):
            one.stop()
            one.close()


def has_hung_up(descriptor: int) -> bool:
    """Whether the other end of a socket is closed now."""
    poller = _poll()
    poller.register(descriptor, select.POLLRDHUP)
    return bool(poller.poll(0))
