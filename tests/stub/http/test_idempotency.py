"""Idempotency-Key: a request that is repeated at any front end, after any cut, runs once.

The engine is a stub; front ends, sockets and the client are real.
"""

import itertools
import os
import re
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from app.http.responses import LOGPROBS_MODE_HEADER
from harness.servers import Server, forked_server, front_ends, stub_worker, wait_until
from titopool import Client
from titopool.errors import Conflict, InvalidRequest

DELAY_S = 3.0
REST = [12, 13, 14]
# Room for a few small answers.
BUDGET = 4000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A slow stub worker behind two front ends."""
    folder = tmp_path_factory.mktemp("keys")
    endpoint = f"ipc://{folder}/worker-0"
    words = ("--delay-s", str(DELAY_S), "--runs-file", str(folder / "runs"))
    with stub_worker(endpoint, *words), forked_server(
        "--endpoints", endpoint, "--num-front-ends", "2", "--idempotency-bytes", str(BUDGET),
        log=folder / "log",
    ) as running:  # fmt: skip
        yield running


_first_ids = itertools.count(100)


@pytest.fixture
def prompt() -> list[int]:
    """A prompt that no other test sends."""
    return [next(_first_ids), *REST]


def num_runs(server: Server, prompt: list[int]) -> int:
    """How often the engine has begun with a prompt."""
    runs = server.log_file.with_name("runs")
    return runs.read_text().split().count(str(prompt[0])) if runs.exists() else 0


def post(
    session: requests.Session, server: Server, key: str, prompt: list[int], **fields: Any
) -> requests.Response:
    headers = {"Idempotency-Key": key}
    body = {"prompts": [prompt], "max_tokens": 4, **fields}
    return session.post(server.url + "/generate/", json=body, headers=headers, timeout=120)


@contextmanager
def in_thread(function, *arguments, **options) -> Iterator[list[Any]]:
    """Runs a call beside the block; the list has its result afterwards."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function(*arguments, **options))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield results
    thread.join(120)
    assert results


def test_a_repeat_at_another_front_end_joins_the_request(server: Server, prompt: list[int]):
    first, second = front_ends(server).values()
    key = uuid.uuid4().hex
    with in_thread(post, first, server, key, prompt) as results:
        wait_until(lambda: num_runs(server, prompt) == 1, 60)
        refused = post(second, server, key, prompt, max_tokens=3)
        joined = post(second, server, key, prompt)
    later = [post(one, server, key, prompt) for one in (first, second)]
    (answer,) = results
    assert answer.json()["completion_ids"] == [prompt[::-1]]
    assert [one.content for one in (joined, *later)] == [answer.content] * 3
    assert joined.headers["Content-Type"] == answer.headers["Content-Type"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert post(first, server, key, prompt, max_tokens=3).status_code == 409
    assert num_runs(server, prompt) == 1
    assert post(first, server, uuid.uuid4().hex, prompt).status_code == 200
    assert num_runs(server, prompt) == 2


class CuttingProxy:
    """Passes connections on, and cuts the first at a point of the exchange."""

    def __init__(self, server: Server, point: str, has_begun: Callable[[], bool]):
        host, port = server.url.removeprefix("http://").split(":")
        self._target, self._point = (host, int(port)), point
        self._has_begun = has_begun
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            point = self._point if self.num_connections == 1 else ""
            threading.Thread(target=self._pass_on, args=(client, point), daemon=True).start()

    def _pass_on(self, client: socket.socket, point: str) -> None:
        with client, socket.create_connection(self._target, 60) as server:
            request = self._message(client)
            if point == "before-the-request":
                return
            server.sendall(request[: len(request) // 2] if point == "in-the-request" else request)
            if point == "in-the-request":
                return
            if point == "while-it-runs":
                wait_until(self._has_begun, 60)
                return
            answer = self._message(server)
            client.sendall(answer[:-5] if point == "in-the-answer" else answer)

    @staticmethod
    def _message(source: socket.socket) -> bytes:
        """One HTTP message with a Content-Length."""
        source.settimeout(120)
        received = b""
        while not (head := re.search(rb"(?is)content-length: (\d+).*?\r\n\r\n", received)) or (
            len(received) < head.end() + int(head[1])
        ):
            received += source.recv(65536)
        return received

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)


@pytest.mark.parametrize(
    "point", ["before-the-request", "in-the-request", "while-it-runs", "in-the-answer"]
)
def test_the_client_repeats_after_a_cut_and_the_engine_runs_once(
    server: Server, prompt: list[int], point: str
):
    proxy = CuttingProxy(server, point, lambda: num_runs(server, prompt) == 1)
    try:
        with Client(proxy.url, timeout_s=120) as client:
            (result,) = client.generate(prompt, max_tokens=4, idempotent=True)
    finally:
        proxy.close()
    assert result.completions[0].ids.tolist() == prompt[::-1]
    assert proxy.num_connections == 2
    assert num_runs(server, prompt) == 1


def test_a_repeat_runs_the_request_of_a_front_end_that_died(server: Server, prompt: list[int]):
    (pid, first), (_, second) = front_ends(server).items()
    key = uuid.uuid4().hex
    with in_thread(post, first, server, key, prompt) as results:
        wait_until(lambda: num_runs(server, prompt) == 1, 60)
        os.kill(pid, signal.SIGKILL)
    assert isinstance(results[0], requests.ConnectionError)
    assert post(second, server, key, prompt).json()["completion_ids"] == [prompt[::-1]]
    assert num_runs(server, prompt) == 2


def test_errors_are_not_kept(server: Server, prompt: list[int]):
    session, key = requests.Session(), uuid.uuid4().hex
    assert post(session, server, key, prompt, max_tokens=-1).status_code == 400
    assert post(session, server, key, prompt).status_code == 200


def test_an_answer_over_the_budget_says_so(server: Server, prompt: list[int]):
    long = prompt + list(range(1, 2000))
    with Client(server.url, timeout_s=120) as client:
        assert client.generate(long, max_tokens=1999, idempotent="large")
        with pytest.raises(Conflict, match="idempotency_bytes"):
            client.generate(long, max_tokens=1999, idempotent="large")
    assert num_runs(server, prompt) == 1


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": REST}),
        ("/generate", {"input_ids": REST, "stream": True}),
        ("/inference/v1/generate", {"token_ids": REST, "sampling_params": {}, "stream": True}),
    ],
)
def test_routes_and_streams_without_keys_refuse_them(server: Server, path: str, body: dict):
    refused = server.post(path, body, headers={"Idempotency-Key": uuid.uuid4().hex})
    assert refused.status_code == InvalidRequest.status
    assert refused.json()["error"]["param"] == "Idempotency-Key"


def test_inference_takes_keys(server: Server):
    body = {"token_ids": REST, "sampling_params": {"max_tokens": 2}}
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    answers = [server.post("/inference/v1/generate", body, headers=headers) for _ in range(2)]
    assert answers[0].content == answers[1].content
    assert answers[0].headers[LOGPROBS_MODE_HEADER] == answers[1].headers[LOGPROBS_MODE_HEADER]
    assert answers[0].json()["choices"][0]["token_ids"] == REST[::-1][:2]


def test_two_clients_may_choose_the_same_key(start_stub, stub_server, tmp_path):
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("one key-of-one\ntwo key-of-two\n")
    start_stub(0, "--runs-file", str(tmp_path / "runs"))
    server = stub_server(1, "--api-key-file", str(keys))
    for name in ("one", "two"):
        headers = {"Authorization": f"Bearer key-of-{name}", "Idempotency-Key": "same"}
        answer = server.post("/generate/", {"prompts": [[5, 6]]}, headers=headers)
        assert answer.status_code == 200
    assert (tmp_path / "runs").read_text().split().count("5") == 2
