"""Notices clients that close their connection while they wait.

WSGI does not tell the application. One thread watches the sockets of all waiting requests
with epoll, so that waiting costs no wake-ups.
"""

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class DisconnectWatcher:
    """Calls back when the other end of a socket is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def start(self) -> None:
        """Starts the thread in this process, once."""
        with self._lock:
            if self._thread is None:
                self._epoll = select.epoll()
                self._close_fd = os.eventfd(0)
                self._epoll.register(self._close_fd, select.EPOLLIN)
                self._thread = threading.Thread(target=self._run, name="disconnects", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread; its descriptors stay for requests that are still to end."""
        with self._lock:
            self._is_closing = True
            thread = self._thread
        if thread is not None:
            os.eventfd_write(self._close_fd, 1)
            thread.join(timeout=2)

    @contextmanager
    def watching(self, client: socket.socket | None, on_gone: Callable[[], None]) -> Iterator[None]:
        """Calls `on_gone`, from the watcher's thread, if `client` hangs up within the block.

        Args:
            client: the connection; None, where the WSGI server shows none, watches nothing.
        """
        if client is None:
            yield
            return
        descriptor = client.fileno()
        with self._lock:
            self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)
            self._callbacks[descriptor] = on_gone
        try:
            yield
        finally:
            with self._lock:
                del self._callbacks[descriptor]
                self._epoll.unregister(descriptor)

    def _run(self) -> None:
        while not self._is_closing:
            for descriptor, _ in self._epoll.poll():
                with self._lock:
                    on_gone = self._callbacks.get(descriptor)
                    # Since the event, its request may have ended and its number been given
                    # to another connection.
                    if on_gone is not None and has_hung_up(descriptor):
                        on_gone()


def has_hung_up(descriptor: int) -> bool:
    """Whether the other end of a socket is closed now."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    return bool(poller.poll(0))
