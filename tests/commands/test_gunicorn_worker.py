"""An answer's head and the first of its body are one send; nothing is held back or lost."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from app.gunicorn_worker import MAX_JOINED, _JoinedHead
from harness.servers import REPOSITORY, environment, free_port, wait_until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"


class Client:
    """A socket that remembers what it was told."""

    def __init__(self):
        self.calls: list[object] = []

    def sendall(self, data: bytes) -> None:
        self.calls.append(data)

    def settimeout(self, timeout_s: float | None) -> None:
        self.calls.append(timeout_s)


@pytest.fixture
def client() -> Client:
    return Client()


def test_head_and_body_are_one_send(client):
    joined = _JoinedHead(client)
    joined.sendall(HEAD)
    assert client.calls == []
    joined.sendall(b"body")
    joined.sendall(b"more")
    joined.flush()
    assert client.calls == [HEAD + b"body", b"more"]


def test_a_head_without_a_body_is_sent(client):
    joined = _JoinedHead(client)
    joined.flush()
    joined.sendall(HEAD)
    joined.flush()
    joined.flush()
    assert client.calls == [HEAD]


def test_a_large_body_is_not_copied(client):
    joined, body = _JoinedHead(client), bytes(MAX_JOINED + 1)
    joined.sendall(HEAD)
    joined.sendall(body)
    assert client.calls[0] == HEAD
    assert client.calls[1] is body


def test_any_other_use_of_the_socket_comes_after_the_head(client):
    joined = _JoinedHead(client)
    joined.settimeout(1)
    joined.sendall(HEAD)
    joined.settimeout(None)
    joined.sendall(b"body")
    assert client.calls == [1, HEAD, None, b"body"]


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n"],
)
def test_a_head_whose_body_may_come_late_is_sent_at_once(client, head):
    joined = _JoinedHead(client)
    joined.sendall(head)
    assert client.calls == [head]
    joined.sendall(b"body")
    joined.flush()
    assert client.calls == [head, b"body"]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a bare WSGI application behind our worker class."""
    port = free_port()
    words = ["-c", os.devnull, "--no-control-socket", "-k", "app.gunicorn_worker.FrontEnd"]
    words += ["-b", f"127.0.0.1:{port}", "tests.kit.peers.plain_wsgi:app"]
    with (tmp_path_factory.mktemp("plain") / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", *words], cwd=REPOSITORY, env=environment(),
            stdout=log, stderr=log,
        )  # fmt: skip
        wait_until(lambda: is_listening(port), 30)
        yield port
        process.terminate()
        process.wait(30)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(
    "method, path", [("HEAD", "/4"), ("GET", "/0"), ("GET", "/none"), ("GET", "/4")]
)
def test_an_answer_is_whole_when_its_connection_closes(port, method, path, version):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(
            f"{method} {path} HTTP/{version}\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == (b"204" if path == "/none" else b"200")
    assert body == (b"body" if (method, path) == ("GET", "/4") else b"")


def test_the_head_of_a_stream_does_not_wait_for_its_first_event(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /late HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as other:
            other.sendall(b"GET /release HTTP/1.1\r\nHost: a\r\n\r\n")
            assert other.recv(4096)
        rest = b"".join(iter(lambda: client.recv(4096), b""))
    assert b"body" in rest
