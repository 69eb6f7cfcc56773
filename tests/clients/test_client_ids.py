"""Ids that clients give to requests and sessions, over gunicorn with stub workers."""

import itertools
import json
import re
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from app.pool.placement import session_worker
from app.pool.records import Worker
from harness.servers import Server, wait_until
from harness.stub_worker import Fault
from tests.conftest import StartServer, StartStub
from tests.kit.peers.connections import connections_by_front_end, send_json

COMPLETIONS = {"prompt": [1, 2], "max_tokens": 2}
GENERATE = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}


@pytest.fixture
def two_front_ends(start_stub: StartStub, stub_server: StartServer) -> Server:
    for index in range(2):
        start_stub(index)
    return stub_server(2, "--num-front-ends", "2")


def test_every_answer_repeats_the_id(two_front_ends: Server):
    server = two_front_ends
    for path, body, status in (
        ("/generate/", {"prompts": [[1, 2]]}, 200),
        ("/get_sequence_logprobs/", {"sequences": [[1]], "prompt_lengths": [5]}, 400),
        ("/v1/completions", COMPLETIONS, 200),
        ("/v1/completions", COMPLETIONS | {"stream": True}, 200),
        ("/v1/completions", COMPLETIONS | {"prompt": [int(Fault.FAIL)]}, 500),
        ("/v1/completions", COMPLETIONS | {"prompt": [int(Fault.FAIL)], "stream": True}, 500),
        ("/v1/chat/completions", {"messages": 1}, 400),
        ("/inference/v1/generate", GENERATE, 200),
        ("/inference/v1/generate", GENERATE | {"stream": True}, 200),
        ("/inference/v1/generate", GENERATE | {"token_ids": [int(Fault.FAIL)]}, 500),
        ("/inference/v1/generate", GENERATE | {"features": {}}, 400),
    ):
        answer = server.post(path, body, headers={"X-Request-Id": "mine"})
        assert (answer.status_code, answer.headers["X-Request-Id"]) == (status, "mine")
    named = server.post("/v1/completions", COMPLETIONS | {"request_id": "of-the-body"})
    assert named.headers["X-Request-Id"] == "of-the-body"
    assert named.json()["id"] == "cmpl-of-the-body"
    for body, headers, name in (
        ({"request_id": "of-the-body"}, {}, "of-the-body"),
        ({"request_id": "of-the-body"}, {"X-Request-Id": "mine"}, "mine"),
    ):
        named = server.post("/inference/v1/generate", GENERATE | body, headers=headers)
        assert named.headers["X-Request-Id"] == named.json()["request_id"] == name
    # An id that no header can have is replaced, and the response says by which.
    named = server.post("/inference/v1/generate", GENERATE | {"request_id": "a b"})
    assert named.headers["X-Request-Id"] == named.json()["request_id"] != "a b"


def test_a_failed_request_is_logged_once_with_its_id(
    start_stub: StartStub, stub_server: StartServer
):
    start_stub(0, "--delay-s", "0.1")
    server = stub_server(1, "--num-front-ends", "2")
    failing: dict[str, dict[str, Any]] = {
        "whole": {"prompt": [int(Fault.FAIL)]},
        "stream": {"prompt": [int(Fault.FAIL)], "stream": True},
        "bad": {"prompt": [-1]},
        "good": {},
        # Last, because the worker dies: an event of the stream has the error.
        "late": {"prompt": [int(Fault.DIE_MID_STREAM), 2, 1], "max_tokens": 3, "stream": True},
    }
    for name, body in failing.items():
        server.post("/v1/completions", COMPLETIONS | body, headers={"X-Request-Id": name})
    lines = [line for line in server.log.splitlines() if "request_ids: request " in line]
    assert [line.partition(": request ")[2].split()[0] for line in lines] == [
        "whole", "stream", "bad", "late",
    ]  # fmt: skip
    assert ["WARNING" in line for line in lines] == [True, True, False, True]


@pytest.mark.parametrize("abort", ["/abort_requests", "/inference/v1/abort_requests"])
def test_a_bodys_id_is_usable_in_an_abort_at_either_front_end(
    start_stub: StartStub, stub_server: StartServer, abort: str
):
    for index in range(2):
        start_stub(index, "--delay-s", "60")
    server = stub_server(2, "--num-front-ends", "2")
    sides = connections_by_front_end(server, 1)
    (first, *_), (second, *_) = sides
    # AReaL needs log-probabilities also of an aborted completion.
    completions = COMPLETIONS | {"logprobs": True, "return_tokens_as_token_ids": True}
    generate = GENERATE | {"sampling_params": {"logprobs": 0}}
    for path, sent in (("/v1/completions", completions), ("/inference/v1/generate", generate)):
        for connection, other, name in ((first, second, "one"), (second, first, "two")):
            send_json(connection, path, sent | {"request_id": name})
            wait_until(lambda: sum(server.metrics("sequences").values()) == 1, 20)
            send_json(other, abort, {"request_ids": [name]})
            aborted = other.getresponse()
            # vLLM's route answers without a body.
            number = (
                b"" if abort.startswith("/inference") else b'{"status":"aborted","aborted":1}\n'
            )
            assert (aborted.status, aborted.read()) == (200, number)
            answer = connection.getresponse()
            (choice,) = json.loads(answer.read())["choices"]
            assert answer.headers["X-Request-Id"] == name
            assert choice["finish_reason"] == "abort"
            assert not any(map(choice["logprobs"].get, ("tokens", "token_logprobs", "content")))
            wait_until(lambda: sum(server.metrics("sequences").values()) == 0, 20)
    for connection in itertools.chain(*sides):
        connection.close()


def test_a_session_stays_at_its_worker(
    start_stub: StartStub, stub_server: StartServer, tmp_path: Path
):
    for index in range(2):
        start_stub(index, TITOPOOL_HEARTBEAT_INTERVAL_S="0.05")
    server = stub_server(2, "--num-front-ends", "2")
    workers = [Worker(f"ipc://{tmp_path}/worker-{index}", 0) for index in range(2)]
    # Without sessions the first worker would get most jobs, because one runs at a time.
    other, session = (
        next(one for one in map(str, itertools.count()) if session_worker(one, workers) is worker)
        for worker in workers
    )
    sides = connections_by_front_end(server, 1)
    num_sent = 0

    def completed(connection: HTTPConnection) -> list[int]:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        found = re.findall(
            r'^titopool_worker_completed_jobs_total{worker="(\d)"} (\d+)', text, re.M
        )
        return [int(number) for _, number in sorted(found)]

    def has_completed(connection: HTTPConnection, number: int) -> bool:
        return sum(completed(connection)) == number

    def send(path: str, body: dict[str, Any], session: str = "") -> None:
        nonlocal num_sent
        for connection, *_ in sides:
            # Until the front end has heard that the workers are idle again.
            wait_until(partial(has_completed, connection, num_sent), 10)
            num_sent += 1
            send_json(connection, path, body, {"X-Session-ID": session} if session else {})
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)

    for path, body in (
        ("/generate/", {"prompts": [[3]]}),
        ("/v1/completions", COMPLETIONS),
        ("/v1/completions", COMPLETIONS | {"stream": True}),
        ("/inference/v1/generate", GENERATE),
    ):
        send(path, body, session)
    # A body's session wins over a header's.
    send("/v1/completions", COMPLETIONS | {"session_id": session}, other)
    send("/inference/v1/generate", GENERATE | {"session_id": session}, other)
    send("/v1/completions", COMPLETIONS, other)
    wait_until(lambda: completed(sides[0][0]) == [2, 12], 10)
    for connection in itertools.chain(*sides):
        connection.close()
