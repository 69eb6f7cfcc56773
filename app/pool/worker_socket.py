"""One front end's connection to one worker: a ZeroMQ DEALER and its monitor, under gevent.

ZeroMQ's file descriptors signal changes only: a socket must be read until it is empty, and checked
again after each send, because a send can consume the signal.
"""

from collections.abc import Callable
from typing import Literal

import gevent
import zmq
from zmq.utils.monitor import recv_monitor_message

from titopool.wire.sockets import make_dealer

# libev's event mask for "readable".
READ = 1
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


# What the monitor reported since it was read last: nothing, that the connection is set up, that it is
# closed, or that the other end has closed it before it was set up.
ConnectionState = Literal["open", "connected", "closed", "refused"]


class WorkerSocket:
    """Calls `on_change(self)` from gevent's hub when there may be something to read."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        key_file: str,
        on_change: Callable[["WorkerSocket"], None],
    ):
        self.endpoint = endpoint
        self.is_closed = False
        # What is sent before waits in this process, for as long as nobody listens.
        self.is_connected = False
        self._on_change = on_change
        self._socket = make_dealer(context, endpoint, key_file)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._socket.connect(endpoint)
        loop = gevent.get_hub().loop
        self._watchers = [loop.io(one.FD, READ) for one in (self._socket, self._monitor)]
        for watcher in self._watchers:
            watcher.start(on_change, self)
        # A descriptor signals nothing before its socket was checked once.
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

    def read_state(self) -> ConnectionState:
        """Reads the monitor's events since the last call.

        A local socket closes only when the worker's process ends. When a connection between
        hosts breaks, the replies in flight are lost with it.
        """
        state: ConnectionState = "open"
        # After an end there is nothing to read: ZeroMQ connects again, and this socket is given up.
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event & HANDSHAKE_FAILED:
                # EVENT_DISCONNECTED follows.
                return "refused"
            if event == zmq.EVENT_DISCONNECTED:
                return "closed"
            self.is_connected, state = True, "connected"
        return state

    def close(self) -> None:
        """Closes the connection; drops frames that are not yet sent or read."""
        self.is_closed = True
        for watcher in self._watchers:
            watcher.stop()
            watcher.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
