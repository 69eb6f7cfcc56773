"""One worker's connection as seen from a front end: a DEALER and its monitor under gevent.

ZeroMQ's descriptors tell only of changes: a socket must be read until it is empty, and looked
at again after each send, which can swallow a change.
"""

from collections.abc import Callable
from enum import Enum

import gevent
import zmq
from zmq.utils.monitor import recv_monitor_message

from titopool.wire.sockets import connect_dealer

# libev's event mask for "readable".
READ = 1
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ConnectionState(Enum):
    """What has become of a connection."""

    OPEN = "stands"
    # It was there and is closed.
    CLOSED = "cut"
    # It was closed before it was there.
    REFUSED = "refused"


class WorkerSocket:
    """Calls `on_change` from gevent's hub when there may be something to read."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        key_file: str,
        on_change: Callable[["WorkerSocket"], None],
    ):
        self.endpoint = endpoint
        self.is_closed = False
        self._on_change = on_change
        self._socket = connect_dealer(context, endpoint, key_file)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        loop = gevent.get_hub().loop
        self._watchers = [loop.io(one.FD, READ) for one in (self._socket, self._monitor)]
        for watcher in self._watchers:
            watcher.start(on_change, self)
        # A descriptor tells of nothing before its socket was looked at once.
        on_change(self)

    def send(self, frame: bytes) -> None:
        """Queues `frame`; returns at once."""
        self._socket.send(frame, zmq.NOBLOCK)
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_change(self)

    def receive(self) -> bytes | None:
        """The next frame, or None."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def state(self) -> ConnectionState:
        """What has become of the connection since the last call.

        The other end of a local socket is closed by nothing but the end of its process; a
        connection between hosts that breaks takes the worker's replies with it.
        """
        fate = ConnectionState.OPEN
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event & HANDSHAKE_FAILED:
                # The other end closes it too, which is told next.
                return ConnectionState.REFUSED
            fate = ConnectionState.CLOSED
        return fate

    def close(self) -> None:
        """Drops what is still to be sent or read."""
        self.is_closed = True
        for watcher in self._watchers:
            watcher.stop()
            watcher.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
