"""HTTP requests as raw bytes, and their responses."""

import http.client
import io
import json
import socket
import time
from typing import Any, NamedTuple

import msgspec

# Seconds within which every request must be answered.
ANSWER_S = 30.0


class Sent(NamedTuple):
    """A request; its `repr` can be pasted as an `@example`."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    # Sizes in bytes of the body's chunks; None sends a Content-Length.
    chunks: tuple[int, ...] | None = None
    # Whether the request is complete; an incomplete one may get no response.
    is_whole: bool = True

    def header(self, name: str) -> str | None:
        found = [value for key, value in self.headers if key.lower() == name.lower()]
        return found[0] if found else None

    def encoded(self) -> bytes:
        """The bytes sent over the socket."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        body = self.body
        if self.chunks is not None:
            lines.append("Transfer-Encoding: chunked")
            body = _chunked(body, self.chunks)
        elif self.header("Transfer-Encoding") is None and self.header("Content-Length") is None:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    def json(self) -> Any:
        """The body as the server's decoder reads it; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


def _chunked(body: bytes, sizes: tuple[int, ...]) -> bytes:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(body[start : start + size])
        start += size
    pieces.append(body[start:])
    framed = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece]
    return b"".join(framed) + b"0\r\n\r\n"


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes
    elapsed_s: float

    @property
    def kind(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0]

    def json(self) -> Any:
        return json.loads(self.body)

    def __str__(self) -> str:
        return f"{self.status} {self.kind} in {self.elapsed_s:.2f} s: {self.body[:1000]!r}"


def ask(port: int, sent: Sent, *, within_s: float = ANSWER_S) -> Answer | None:
    """The response to a request; None if the connection ended without one.

    Raises:
        TimeoutError: no complete response within `within_s`.
    """
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=within_s) as client:
        try:
            client.sendall(sent.encoded())
            if not sent.is_whole:
                client.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            # The server may refuse a request by its head, before it has read the body.
            pass
        received = _receive(client, began + within_s)
    if not received:
        return None
    response = http.client.HTTPResponse(_Replay(received), method=sent.method)  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, body, time.monotonic() - began)


def _receive(client: socket.socket, deadline: float) -> bytes:
    received = b""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no whole answer within the deadline, but {received[:300]!r}")
        client.settimeout(left_s)
        try:
            data = client.recv(2**16)
        except ConnectionResetError:
            # The connection is reset when the server closes it with unread bytes of the request.
            return received
        if not data:
            return received
        received += data


class _Replay:
    """Bytes in place of a socket."""

    def __init__(self, data: bytes):
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)
