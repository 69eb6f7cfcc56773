"""Deadlines on a client's connection: gunicorn's own reads and writes have none."""

import socket
import struct

from flask import Flask, request


def init_app(app: Flask, timeout_s: float) -> None:
    """Ends a connection whose client neither sends the rest of its request nor takes its answer."""
    # struct timeval
    timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))

    @app.before_request
    def set_deadlines() -> None:
        client = request.environ.get("gunicorn.socket")
        if client is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
