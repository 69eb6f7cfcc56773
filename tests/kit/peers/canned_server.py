"""Answers HTTP requests with bytes that a test gives: what titopool's server would not send."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from titopool.release import RELEASE, VERSION_HEADER


def response(status: str, body: bytes = b"", *headers: str, release: str | None = RELEASE) -> bytes:
    """One HTTP response, with the header of the release unless it is None."""
    named = [] if release is None else [f"{VERSION_HEADER}: {release}"]
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *named, *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@contextmanager
def canned_server(*answers: bytes | None) -> Iterator[str]:
    """The URL of a server that sends `answers[i]` to connection i and closes it; None: no answer.

    The last answer repeats.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve() -> None:
            for index in range(1000):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    answer = answers[min(index, len(answers) - 1)]
                    connection.recv(65536)
                    if answer is None:
                        ended.wait(60)
                    else:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            # Ends the wait in `accept`; closing alone does not.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
