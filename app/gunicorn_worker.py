"""gunicorn's gevent worker, which also answers connections that it accepted just before a reload."""

import socket
from types import SimpleNamespace
from typing import Any

from gunicorn.workers.ggevent import GeventWorker


class FrontEnd(GeventWorker):  # type: ignore[misc]
    """A front end's process.

    A front end that ends closes its listeners first. gunicorn asks the listener for its address
    when it serves a connection, so one that is still shaking hands would be dropped unanswered.
    """

    def run(self) -> None:
        """Remembers the listeners' addresses, and serves."""
        self._addresses = {one: one.getsockname() for one in self.sockets}
        super().run()

    def handle(self, listener: socket.socket, client: socket.socket, address: Any) -> None:
        """Serves a connection, whether or not `listener` is still open."""
        name = self._addresses[listener]
        super().handle(SimpleNamespace(getsockname=lambda: name), client, address)
