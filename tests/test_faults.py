"""Faults, staged with stub engines: real gunicorn, real workers' processes and sockets."""

import concurrent.futures
import os
import signal
import socket
import time

import pytest
import requests

from tests.servers import Server, wait_until
from tests.stub_worker import Fault

# Short, so that silence is noticed within a test.
QUICK = {"TITOPOOL_HEARTBEAT_INTERVAL_S": "0.1", "TITOPOOL_HEARTBEAT_TIMEOUT_S": "3"}


def error_of(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def in_background(pool: concurrent.futures.Executor, server: Server, prompts, **fields):
    return pool.submit(server.post, "/generate/", {"prompts": prompts, **fields})


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        yield pool


def test_a_job_that_fails_fails_its_request_only(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1)
    assert error_of(server.post("/generate/", {"prompts": [[1], [Fault.FAIL]]})) == (
        500, "generation_failed",
    )  # fmt: skip
    answer = server.post("/generate/", {"prompts": [[Fault.RAISE]]})
    assert error_of(answer) == (500, "generation_failed")
    # What nobody expected is in the worker's log, not in the answer.
    assert "staged surprise" not in answer.text
    assert server.generate([[1, 2, 3]])["completion_ids"] == [[3, 2, 1]]


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.DIE, Fault.FREEZE], ids=str)
def test_jobs_of_a_dead_worker_go_to_another(start_stub, stub_server, threads, fault):
    first = start_stub(0, "--delay-s", "2", **QUICK)
    start_stub(1, "--delay-s", "2", **QUICK)
    server = stub_server(2, **QUICK)
    good = [in_background(threads, server, [[index, 7, index]]) for index in range(1, 33)]
    time.sleep(0.5)
    match fault:
        case Fault.KILL:
            first.kill()
        case Fault.FREEZE:
            first.send_signal(signal.SIGSTOP)
        case Fault.DIE:
            first.terminate()
    for index, answer in enumerate(good, start=1):
        body = answer.result(timeout=30).json()
        assert body["completion_ids"] == [[index, 7, index]]
    assert server.get("/ready").json()["num_ready"] == 1


def test_a_prompt_that_kills_two_workers_is_not_tried_on_a_third(start_stub, stub_server):
    for index in range(3):
        start_stub(index)
    server = stub_server(3)
    answer = server.post("/generate/", {"prompts": [[Fault.KILL]]})
    assert error_of(answer) == (500, "generation_failed")
    assert "2 workers died" in answer.json()["error"]["message"]
    assert server.get("/ready").json()["num_ready"] == 1
    assert server.generate([[5, 6]])["completion_ids"] == [[6, 5]]


def test_a_worker_that_wakes_up_late_answers_nothing_twice(start_stub, stub_server, threads):
    workers = [start_stub(index, "--delay-s", "1", **QUICK) for index in range(2)]
    server = stub_server(2, **QUICK)
    answers = [in_background(threads, server, [[index, 1]]) for index in range(1, 9)]
    time.sleep(0.3)
    workers[0].send_signal(signal.SIGSTOP)
    for index, answer in enumerate(answers, start=1):
        assert answer.result(timeout=30).json()["completion_ids"] == [[1, index]]
    workers[0].send_signal(signal.SIGCONT)
    wait_until(lambda: server.get("/ready").json()["num_ready"] == 2, 10)
    assert server.generate([[9, 8]] * 8)["completion_ids"] == [[8, 9]] * 8


def test_open_jobs_wait_for_the_only_worker_to_come_back(start_stub, stub_server, threads):
    first = start_stub(0, "--delay-s", "5")
    server = stub_server(1)
    answer = in_background(threads, server, [[1, 2]])
    time.sleep(0.5)
    first.kill()
    wait_until(lambda: server.get("/health").status_code == 503, 5)
    assert error_of(server.post("/generate/", {"prompts": [[1]]})) == (503, "no_ready_worker")
    start_stub(0)
    assert answer.result(timeout=30).json()["completion_ids"] == [[2, 1]]


def test_jobs_without_any_worker_end_at_the_start_timeout(start_stub, stub_server, threads):
    worker = start_stub(0, "--delay-s", "60")
    server = stub_server(1, TITOPOOL_WORKER_START_TIMEOUT_S="2")
    answer = in_background(threads, server, [[1, 2]])
    time.sleep(0.5)
    worker.kill()
    assert error_of(answer.result(timeout=20)) == (503, "no_ready_worker")


def test_a_deadline_ends_a_request_that_hangs_and_stops_its_jobs(start_stub, stub_server):
    start_stub(0, "--max-num-seqs", "4")
    server = stub_server(1, TITOPOOL_REQUEST_TIMEOUT_S="1.5")
    begin = time.monotonic()
    answer = server.post("/generate/", {"prompts": [[Fault.HANG]] * 4})
    assert error_of(answer) == (504, "deadline_passed")
    assert time.monotonic() - begin < 5
    # Its places are free again: four more fit at once.
    assert server.generate([[1, 2]] * 4)["completion_ids"] == [[2, 1]] * 4


def test_a_client_that_hangs_up_frees_its_places(start_stub, stub_server):
    start_stub(0, "--max-num-seqs", "1")
    server = stub_server(1)
    host, port = server.url.removeprefix("http://").split(":")
    body = f'{{"prompts": [[{int(Fault.HANG)}], [{int(Fault.HANG)}]]}}'
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"POST /generate/ HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        time.sleep(0.5)
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]


def test_a_full_queue_is_429_with_retry_after(start_stub, stub_server, threads):
    start_stub(0, "--delay-s", "2")
    server = stub_server(1, TITOPOOL_MAX_QUEUED_PROMPTS="8", TITOPOOL_NUM_FRONT_ENDS="1")
    first = in_background(threads, server, [[1, 2]] * 8)
    time.sleep(0.5)
    answer = server.post("/generate/", {"prompts": [[1]]})
    assert error_of(answer) == (429, "queue_full")
    assert int(answer.headers["Retry-After"]) >= 1
    assert first.result(timeout=20).status_code == 200


def test_too_large_a_body_is_413(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1, TITOPOOL_MAX_BODY_BYTES="1000")
    answer = server.post("/generate/", {"prompts": [[1] * 1000]})
    assert error_of(answer) == (413, "body_too_large")
    assert "1000" in answer.json()["error"]["message"]
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]


def test_the_api_key_guards_every_route_but_health(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1, TITOPOOL_API_KEY="secret")
    assert error_of(server.post("/generate/", {"prompts": [[1]]})) == (401, "invalid_api_key")
    assert error_of(server.get("/get_world_size/")) == (401, "invalid_api_key")
    wrong = {"Authorization": "Bearer other"}
    assert server.post("/generate/", {"prompts": [[1]]}, headers=wrong).status_code == 401
    right = {"Authorization": "Bearer secret"}
    assert server.post("/generate/", {"prompts": [[1]]}, headers=right).status_code == 200
    for path in ("/health", "/live", "/ready"):
        assert server.get(path).status_code == 200


def test_health_tells_starting_from_ready(start_stub, stub_server, tmp_path, threads):
    start_stub(0, "--load-s", "0.1")
    server = stub_server(1)
    for path in ("/health", "/health/", "/ready", "/live/"):
        assert server.get(path).status_code == 200, path
    os.kill(server.process.pid, 0)


def test_1000_requests_at_once_all_succeed_while_health_answers(start_stub, stub_server):
    start_stub(0, "--delay-s", "1", "--max-num-seqs", "2000")
    start_stub(1, "--delay-s", "1", "--max-num-seqs", "2000")
    server = stub_server(2, TITOPOOL_NUM_FRONT_ENDS="2")
    with concurrent.futures.ThreadPoolExecutor(1000) as pool:
        answers = [in_background(pool, server, [[index, 3]]) for index in range(1, 1001)]
        time.sleep(1)
        begin = time.monotonic()
        assert server.get("/health").status_code == 200
        assert time.monotonic() - begin < 3
        for index, answer in enumerate(answers, start=1):
            body = answer.result(timeout=60).json()
            assert body.get("completion_ids") == [[3, index]], body


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_requests_that_are_open_at_the_end_get_an_answer(start_stub, stub_server, threads, number):
    start_stub(0)
    server = stub_server(1)
    answer = in_background(threads, server, [[Fault.HANG]])
    time.sleep(0.5)
    server.process.send_signal(number)
    assert error_of(answer.result(timeout=10)) == (503, "no_ready_worker")
    server.process.wait(10)


def test_both_workers_share_the_jobs_of_one_request(start_stub, stub_server):
    # Two places each and one second a job: eight jobs take two rounds on two workers, not four.
    for index in range(2):
        start_stub(index, "--delay-s", "1", "--max-num-seqs", "2")
    server = stub_server(2)
    begin = time.monotonic()
    server.generate([[index, 1] for index in range(1, 9)])
    assert time.monotonic() - begin < 3.5


def test_metrics_of_the_whole_pool_from_any_front_end(start_stub, stub_server):
    for index in range(2):
        start_stub(index, **QUICK)
    server = stub_server(2, TITOPOOL_NUM_FRONT_ENDS="2", **QUICK)
    server.generate([[index, 1, 1] for index in range(1, 11)], n=2, max_tokens=2)
    server.post("/generate/", {"prompts": [[Fault.FAIL]]})

    def total(name: str) -> float:
        lines = server.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    # Each front end learns of it by its own next heartbeat.
    for name, value in {
        "completed_jobs_total": 10, "failed_jobs_total": 1, "prompt_tokens_total": 30,
        "completion_tokens_total": 40, "ready": 2, "sequences": 0,
    }.items():  # fmt: skip
        wait_until(lambda name=name, value=value: total(f"titopool_worker_{name}") == value, 5)
