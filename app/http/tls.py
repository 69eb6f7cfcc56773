"""TLS connections of gunicorn's gevent worker: a handshake has a deadline and no traceback."""

import ssl
from collections.abc import Callable
from typing import Any

import gevent


def ssl_context(config: Any, default_factory: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """gunicorn's hook `ssl_context`: a context for the server's side of connections.

    Without it, gevent shakes hands before gunicorn's error handling begins, and waits for ever for
    a client that connects and sends nothing.
    """
    context = default_factory()
    base: Any = context.sslsocket_class
    wrap_socket = context.wrap_socket

    class TimedSocket(base):  # type: ignore[misc]
        """A connection whose handshake may take as long as gunicorn waits for a request."""

        def do_handshake(self, *arguments: Any) -> None:
            """Raises:
            SSLError: the client did not complete the handshake in time.
            """
            # gunicorn closes the connection after an error of this kind, and logs nothing.
            late = ssl.SSLError(ssl.SSL_ERROR_EOF, "no TLS handshake in time")
            with gevent.Timeout(config.keepalive, late):
                super().do_handshake(*arguments)

    # gunicorn shakes hands itself, where it handles errors.
    context.sslsocket_class = TimedSocket
    context.wrap_socket = lambda sock, **options: wrap_socket(  # type: ignore[method-assign]
        sock, **options, do_handshake_on_connect=False
    )
    return context
