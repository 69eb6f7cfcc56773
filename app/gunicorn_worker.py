"""gunicorn's gevent worker, which counts its open requests and ends without losing one."""

import socket
from types import SimpleNamespace
from typing import Any

from gunicorn.workers.ggevent import GeventWorker

from titopool.settings.logs import current_request


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

    def handle_request(self, *arguments: Any) -> None:
        """Serves one request."""
        self.num_open += 1
        try:
            super().handle_request(*arguments)
        finally:
            self.num_open -= 1
            # The next request of the connection has another one.
            current_request.set("")
