"""A server that answers with given bytes, as a broken one or a proxy would."""

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

Body = dict[str, Any]
# Maps a path and a body to the bytes of the response.
Answer = Callable[[str, Body], bytes]


def reply(body: Any, status: str = "200 OK", length: int | None = None) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(raw) if length is None else length}\r\n\r\n"
    return head.encode() + raw


class FakeServer:
    """Answers each connection once with the given bytes, then hangs up."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            asked = lines.readline()
            if not asked:
                # The client connects once to find its own address.
                return
            length = 0
            while (line := lines.readline().strip().lower()) != b"":
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            body = json.loads(lines.read(length) or b"{}")
            connection.sendall(self._answer(asked.split()[1].decode(), body))

    def close(self) -> None:
        self._listening.close()
