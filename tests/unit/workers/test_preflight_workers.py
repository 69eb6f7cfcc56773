"""What `titopool doctor --url` says of a front end that lets its workers try nothing."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from workers.preflight import _check_workers

FAULT = {
    "worker": "one", "endpoint": "tcp://10.0.0.1:5", "peer": None, "peer_endpoint": "tcp://[fd::2]:5",
    "reason": "expected a TCP connection",
}  # fmt: skip


@contextmanager
def front_end(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the keys that it got."""
    keys: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            keys.append(self.headers["Authorization"])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status, body, said", [
    (401, b'{"error": {"message": "send a key"}}', "not checked: send a key"),
    (404, b"<html>", "not checked: status 404"),
    (200, b'{"num_tried": 2, "faults": []}', "all 2 connections open"),
    (200, b'{"num_tried": 0, "faults": []}', "nothing to try"),
])  # fmt: skip
def test_what_was_not_checked_is_no_fault(status: int, body: bytes, said: str):
    with front_end(status, body) as (url, _):
        ((pair, result, fault),) = _check_workers(url)
    assert (pair, fault) == ("worker → worker", "")
    assert said in result


def test_a_pair_that_cannot_connect_and_an_answer_that_is_none_are_faults():
    with front_end(200, json.dumps({"num_tried": 1, "faults": [FAULT]}).encode()) as (url, _):
        ((pair, _, fault),) = _check_workers(url)
    assert (pair, fault) == ("worker one at 10.0.0.1:5 → worker ? at [fd::2]:5", FAULT["reason"])
    with front_end(200, b"[]") as (url, _):
        ((_, _, fault),) = _check_workers(url)
    assert "expected the front end's answer" in fault


def test_no_other_host_gets_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TITOPOOL_ADMIN_KEY", "an-administrator's")
    with (
        front_end(200, b'{"num_tried": 1, "faults": []}') as (other, others_keys),
        front_end(307, b"", Location=other) as (url, keys),
    ):
        ((_, result, fault),) = _check_workers(url)
    assert (keys, others_keys) == (["Bearer an-administrator's"], [])
    assert (result, fault) == ("not checked: status 307", "")
