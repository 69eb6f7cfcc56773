"""Notices clients that close their connection while they wait. WSGI does not tell."""

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gevent
from gevent.monkey import get_original

from app.wire import READ

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
    watcher = gevent.get_hub().loop.io(descriptor, READ)

    def look() -> None:
        # Also when a client sends the next request early: nothing can be told then until
        # this one has ended.
        watcher.stop()
        if has_hung_up(descriptor):
            gevent.spawn(on_gone)

    watcher.start(look)
    try:
        yield
    finally:
        watcher.stop()
        watcher.close()


def has_hung_up(descriptor: int) -> bool:
    """Whether the other end of a socket is closed now."""
    poller = _poll()
    poller.register(descriptor, select.POLLRDHUP)
    return bool(poller.poll(0))
