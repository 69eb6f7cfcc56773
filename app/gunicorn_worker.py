"""gunicorn's gevent worker, which counts its open requests and ends without losing one."""

import socket
from types import SimpleNamespace
from typing import Any

from gunicorn.workers.ggevent import GeventWorker

from titopool.settings.logs import current_request

# Bytes of what follows an answer's head; to join more costs more than to send twice.
MAX_JOINED = 256 * 1024
# In a head whose body follows at once. A stream's may come late.
LENGTH = b"\r\nContent-Length: "


class FrontEnd(GeventWorker):  # type: ignore[misc]
    """A front end's process.

    A front end that ends closes its listeners first. gunicorn asks the listener for its address
    when it serves a connection, so one that is still shaking hands would be dropped unanswered.
    """

    # HTTP requests whose answer is not completely written.
    num_open = 0

    def run(self) -> None:
        """Remembers the listeners' addresses, and serves."""
        self._addresses = {one: one.getsockname() for one in self.sockets}
        super().run()

    def handle(self, listener: socket.socket, client: socket.socket, address: Any) -> None:
        """Serves a connection, whether or not `listener` is still open."""
        name = self._addresses[listener]
        super().handle(SimpleNamespace(getsockname=lambda: name), client, address)

    def handle_request(self, name: Any, request: Any, client: socket.socket, address: Any) -> None:
        """Serves one request."""
        self.num_open += 1
        joined = _JoinedHead(client)
        try:
            super().handle_request(name, request, joined, address)
            joined.flush()
        except StopIteration:
            # The connection closes after this answer.
            joined.flush()
            raise
        finally:
            self.num_open -= 1
            # The next request of the connection has another one.
            current_request.set("")


class _JoinedHead:
    """A client's socket for one answer: its head is sent together with what follows.

    gunicorn sends the two by themselves, and a send is a twentieth of a request's CPU time.
    """

    def __init__(self, client: socket.socket):
        self._client = client
        # None: nothing was written yet.
        self._head: bytes | None = None

    def sendall(self, data: bytes) -> None:
        if self._head is None and LENGTH in data:
            self._head = data
        elif self._head and len(data) <= MAX_JOINED:
            head, self._head = self._head, b""
            self._client.sendall(head + data)
        else:
            self.flush()
            self._head = b""
            self._client.sendall(data)

    def flush(self) -> None:
        """Sends a head that nothing has followed."""
        if self._head:
            head, self._head = self._head, b""
            self._client.sendall(head)

    def __getattr__(self, name: str) -> Any:
        self.flush()
        return getattr(self._client, name)
