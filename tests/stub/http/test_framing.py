"""Requests with malformed HTTP or chunked framing are refused with an error in JSON."""

import json
import re
import socket
from collections.abc import Callable

import pytest

from harness.hostile_requests import BODIES, CHUNKED
from harness.servers import Server, wait_until
from harness.stub_worker import Fault
from tests.conftest import StartStub

HEADS = {
    "length-no-number": b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
    "two-lengths": b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "unknown-coding": b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: x\r\n\r\n",
    "no-version": b"GET /live\r\n\r\n",
    "path-no-ascii": b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "header-no-colon": b"GET /live HTTP/1.1\r\nnonsense\r\n\r\n",
    "long-line": b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def exchange(server: Server, sent: bytes) -> tuple[bytes, bytes]:
    """Head and body of the only response, after which the server closes the connection."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        received = b""
        while data := client.recv(65_536):
            received += data
    head, _, rest = received.partition(b"\r\n\r\n")
    length = re.search(rb"\r\nContent-Length: (\d+)", head)
    assert length, received
    assert len(rest) == int(length[1]), received
    return head, rest


def post(body: bytes) -> bytes:
    head = f"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


@pytest.fixture
def server(start_stub: StartStub, stub_server: Callable[..., Server]) -> Server:
    start_stub(0)
    return stub_server(1, "--num-front-ends", "1")


def check_refused(head: bytes, body: bytes, *codes: str) -> None:
    assert b"\r\nContent-Type: application/json" in head, head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert error["code"] in codes
    assert error["type"] == "invalid_request_error"


def test_malformed_requests_are_refused_in_json(server: Server):
    for name, sent in BODIES.items():
        head, body = exchange(server, CHUNKED + sent)
        assert head.startswith(b"HTTP/1.1 400 "), (name, head)
        check_refused(head, body, "invalid_request")
    for name, sent in HEADS.items():
        head, body = exchange(server, sent)
        assert head.split(b" ")[1] in (b"400", b"414", b"501"), (name, head)
        check_refused(head, body, "bad_request", "uri_too_long", "not_implemented")
    assert "Traceback" not in server.log
    # The log has who sent them, not what: it may be the end of a body.
    assert "Invalid request from ip=127.0.0.1" in server.log
    assert "nonsense" not in server.log
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]


def test_a_client_that_ends_its_sending_side_is_taken_for_gone(server: Server):
    """As of a client that was killed, whose generation must stop, nothing else can be seen."""
    head, body = exchange(server, post(json.dumps({"prompts": [[Fault.HANG]]}).encode()))
    assert head.startswith(b"HTTP/1.1 499 "), body
    assert "keep the sending side open" in json.loads(body)["error"]["message"]
    wait_until(lambda: server.metrics("sequences") == {"0": 0}, 20)


def test_bytes_after_a_malformed_body_are_not_read_as_a_request(server: Server):
    smuggled = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for name, sent in BODIES.items():
        _, body = exchange(server, CHUNKED + sent + smuggled)
        assert b'"pid"' not in body, (name, body)
