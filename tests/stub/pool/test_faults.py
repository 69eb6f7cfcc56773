"""Faults staged by stub engines, behind real gunicorn, worker processes and sockets."""

import concurrent.futures
import signal
import socket
from pathlib import Path

import psutil
import pytest
import requests

from app.pool.suspects import RESTART_S
from harness.servers import START_TIMEOUT_S, Server, alive, wait_until
from harness.stub_worker import Fault
from titopool.settings.config import ServerConfig

# Short heartbeats, so that a silent worker is lost within a test.
QUICK = {"TITOPOOL_HEARTBEAT_INTERVAL_S": "0.1", "TITOPOOL_HEARTBEAT_TIMEOUT_S": "3"}


def error_of(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def in_background(pool: concurrent.futures.Executor, server: Server, prompts, **fields):
    return pool.submit(server.post, "/generate/", {"prompts": prompts, **fields})


def wait_for_jobs(server: Server, number: int) -> None:
    """Returns once the workers' heartbeats report `number` sequences in flight."""
    wait_until(lambda: sum(server.metrics("sequences").values()) == number, 20)


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
    for fault in (Fault.RAISE, Fault.PANIC):
        answer = server.post("/generate/", {"prompts": [[fault]]})
        assert error_of(answer) == (500, "generation_failed")
        # Only the worker's log has the text of an unexpected error.
        assert "staged" not in answer.text
    assert server.generate([[1, 2, 3]])["completion_ids"] == [[3, 2, 1]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=str)
def test_jobs_of_a_lost_worker_are_requeued_at_another(start_stub, stub_server, threads, number):
    first = start_stub(0, "--delay-s", "4", **QUICK)
    start_stub(1, "--delay-s", "4", **QUICK)
    server = stub_server(2, **QUICK)
    good = [in_background(threads, server, [[index, 7, index]]) for index in range(1, 33)]
    wait_for_jobs(server, 32)
    first.send_signal(number)
    for index, answer in enumerate(good, start=1):
        body = answer.result(timeout=30).json()
        assert body.get("completion_ids") == [[index, 7, index]], body
    assert server.get("/ready").json()["num_ready"] == 1


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.DIE], ids=str)
def test_a_prompt_that_killed_two_workers_is_not_sent_to_a_third(start_stub, stub_server, fault):
    for index in range(3):
        start_stub(index)
    server = stub_server(3)
    answer = server.post("/generate/", {"prompts": [[fault]]})
    assert error_of(answer) == (500, "generation_failed")
    assert "2 workers died" in answer.json()["error"]["message"]
    wait_until(lambda: server.get("/ready").json()["num_ready"] == 1, START_TIMEOUT_S)
    assert server.generate([[5, 6]])["completion_ids"] == [[6, 5]]


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.FREEZE], ids=str)
def test_a_deadly_prompt_fails_alone_among_those_of_two_front_ends(
    start_stub, stub_server, threads, fault
):
    probes = {"TITOPOOL_ENGINE_PROBE_TIMEOUT_S": "1"}
    for index in range(3):
        start_stub(index, "--delay-s", "0.5", **QUICK, **probes)
    server = stub_server(3, TITOPOOL_NUM_FRONT_ENDS="2", **QUICK)
    # Suspects wait for a lost worker for `RESTART_S` before they go to the only one that serves.
    good = [in_background(threads, server, [[index, 7, index]]) for index in range(1, 31)]
    bad = in_background(threads, server, [[8, 8], [fault]])
    good += [in_background(threads, server, [[index, 7, index]]) for index in range(31, 61)]
    for index, answer in enumerate(good, start=1):
        body = answer.result(timeout=RESTART_S + 30).json()
        assert body.get("completion_ids") == [[index, 7, index]], body
    answer = bad.result(timeout=RESTART_S + 30)
    assert error_of(answer) == (500, "generation_failed")
    assert "prompts[1]: 2 workers died" in answer.json()["error"]["message"]
    wait_until(lambda: server.get("/ready").json()["num_ready"] == 1, START_TIMEOUT_S)
    assert server.generate([[5, 6]])["completion_ids"] == [[6, 5]]


def test_workers_stopped_by_sigterm_do_not_count_against_a_job(start_stub, stub_server, threads):
    words = ("--delay-s", "6")
    workers = [
        start_stub(index, *words, TITOPOOL_DRAIN_TIMEOUT_S="1", **QUICK) for index in range(2)
    ]
    server = stub_server(2)
    answer = in_background(threads, server, [[1, 2]])
    for worker in workers:
        wait_for_jobs(server, 1)
        worker.terminate()
        worker.wait(10)
    start_stub(0)
    body = answer.result(timeout=30).json()
    assert body.get("completion_ids") == [[2, 1]], body


def test_late_results_of_a_stopped_worker_are_dropped(start_stub, stub_server, threads):
    workers = [start_stub(index, "--delay-s", "3", **QUICK) for index in range(2)]
    server = stub_server(2, **QUICK)
    answers = [in_background(threads, server, [[index, 1]]) for index in range(1, 9)]
    wait_for_jobs(server, 8)
    workers[0].send_signal(signal.SIGSTOP)
    for index, answer in enumerate(answers, start=1):
        assert answer.result(timeout=30).json()["completion_ids"] == [[1, index]]
    workers[0].send_signal(signal.SIGCONT)
    wait_until(lambda: server.get("/ready").json()["num_ready"] == 2, START_TIMEOUT_S)
    assert server.generate([[9, 8]] * 8)["completion_ids"] == [[8, 9]] * 8


def test_open_jobs_wait_for_the_only_worker_to_restart(start_stub, stub_server, threads):
    first = start_stub(0, "--delay-s", "5")
    server = stub_server(1)
    answer = in_background(threads, server, [[1, 2]])
    wait_for_jobs(server, 1)
    first.kill()
    wait_until(lambda: server.get("/health").status_code == 503, 20)
    assert error_of(server.post("/generate/", {"prompts": [[1]]})) == (503, "no_ready_worker")
    start_stub(0)
    assert answer.result(timeout=30).json()["completion_ids"] == [[2, 1]]


def test_jobs_without_any_worker_fail_at_the_start_timeout(start_stub, stub_server, threads):
    worker = start_stub(0, "--delay-s", "60")
    server = stub_server(1, TITOPOOL_WORKER_START_TIMEOUT_S="2")
    answer = in_background(threads, server, [[1, 2]])
    wait_for_jobs(server, 1)
    worker.kill()
    assert error_of(answer.result(timeout=20)) == (503, "no_ready_worker")


def test_a_deadline_ends_a_request_that_hangs_and_aborts_its_jobs(start_stub, stub_server):
    start_stub(0, "--max-num-seqs", "4")
    server = stub_server(1, TITOPOOL_REQUEST_TIMEOUT_S="1.5")
    # The job never ends by itself.
    answer = server.post("/generate/", {"prompts": [[Fault.HANG]] * 4})
    assert error_of(answer) == (504, "deadline_passed")
    # The slots are free again: four more jobs fit at once.
    assert server.generate([[1, 2]] * 4)["completion_ids"] == [[2, 1]] * 4


def test_a_client_that_disconnects_frees_its_slots(start_stub, stub_server):
    start_stub(0, "--max-num-seqs", "1")
    server = stub_server(1)
    host, port = server.url.removeprefix("http://").split(":")
    body = f'{{"prompts": [[{int(Fault.HANG)}], [{int(Fault.HANG)}]]}}'
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        wait_for_jobs(server, 1)
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]


def test_a_full_queue_is_429_with_retry_after(start_stub, stub_server, threads):
    start_stub(0, "--delay-s", "6")
    server = stub_server(1, TITOPOOL_MAX_QUEUED_PROMPTS="8", TITOPOOL_NUM_FRONT_ENDS="1")
    first = in_background(threads, server, [[1, 2]] * 8)
    wait_for_jobs(server, 8)
    answer = server.post("/generate/", {"prompts": [[1]]})
    assert error_of(answer) == (429, "queue_full")
    assert int(answer.headers["Retry-After"]) >= 1
    assert first.result(timeout=20).status_code == 200
    # Time does not help a request that alone has more.
    alone = server.post("/generate/", {"prompts": [[1]] * 9})
    assert error_of(alone) == (400, "invalid_request")
    assert "expected at most 8 prompts in one request (max_queued_prompts), got 9" in alone.text


def test_a_too_large_body_is_413(start_stub, stub_server):
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


def test_the_admin_key_guards_what_changes_the_model(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1, TITOPOOL_API_KEY="user", TITOPOOL_ADMIN_KEY="trainer")
    user = {"Authorization": "Bearer user"}
    trainer = {"Authorization": "Bearer trainer"}
    for path in ("/pause", "/weights/begin", "/init_communicator", "/v1/load_lora_adapter"):
        answer = server.post(path, {}, headers=user)
        assert error_of(answer) == (401, "invalid_api_key")
        assert "admin_key" in answer.json()["error"]["message"]
        assert server.post(path, {}, headers=trainer).status_code == 400
    for headers in (user, trainer):
        assert server.post("/generate/", {"prompts": [[1]]}, headers=headers).status_code == 200
    assert server.get("/nowhere").status_code == 401
    assert server.get("/health").status_code == 200


def test_an_admin_key_alone_leaves_generation_open(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1, TITOPOOL_ADMIN_KEY="trainer")
    assert server.post("/generate/", {"prompts": [[1]]}).status_code == 200
    assert error_of(server.post("/pause", {})) == (401, "invalid_api_key")


def test_health_distinguishes_starting_from_ready(start_stub, stub_server, tmp_path: Path):
    loaded = tmp_path / "loaded"
    start_stub(0, "--load-until", str(loaded))
    server = stub_server(1, num_ready=0)
    assert server.get("/live/").status_code == 200
    wait_until(lambda: server.get("/ready").json()["workers"][0]["phase"] == "loading", 5)
    assert server.get("/ready").status_code == 503
    for answer in (server.get("/health/"), server.post("/generate/", {"prompts": [[1]]})):
        assert error_of(answer) == (503, "no_ready_worker")
        assert "0 is loading" in answer.json()["error"]["message"]
    loaded.touch()
    server.wait_until_ready()
    for path in ("/health", "/health/", "/ready", "/live"):
        assert server.get(path).status_code == 200, path


def test_a_worker_with_another_model_gets_no_jobs(start_stub, stub_server):
    start_stub(0)
    server = stub_server(2, num_ready=1)
    start_stub(1, "--max-model-len", "77")
    phases = lambda: {one["phase"] for one in server.get("/ready").json()["workers"]}  # noqa: E731
    wait_until(lambda: phases() == {"ready", "mismatched"}, 10)
    assert ", got 77" in server.log
    # Requests are checked against the limits of the serving model.
    for _ in range(8):
        assert len(server.generate([[1] * 100], max_tokens=1)["completion_ids"]) == 1
    assert len(server.generate([[1, 2]] * 20)["completion_ids"]) == 20
    assert server.metrics("completed_jobs_total").get("1", 0) == 0


def test_requests_are_checked_for_the_model_that_a_pool_restarts_with(start_stub, stub_server):
    first = start_stub(0)
    server = stub_server(1, "--num-front-ends", "2")
    assert server.generate([[40_000, 2]])["completion_ids"] == [[2, 40_000]]
    first.kill()
    start_stub(0, "--model", "another", "--vocab-size", "77")
    models = lambda: server.get("/v1/models").json()["data"][0]["id"]  # noqa: E731
    wait_until(lambda: all(models() == "another" for _ in range(8)), 15)
    for _ in range(4):
        answer = server.post("/generate/", {"prompts": [[40_000, 2]]})
        assert error_of(answer) == (400, "invalid_request")
        assert "[0, 77)" in answer.json()["error"]["message"]
        assert server.generate([[76, 2]])["completion_ids"] == [[2, 76]]


def test_health_answers_while_max_open_requests_are_open(start_stub, stub_server, threads):
    start_stub(0, "--delay-s", "6")
    server = stub_server(1, TITOPOOL_MAX_OPEN_REQUESTS="4", TITOPOOL_NUM_FRONT_ENDS="1")
    answers = [in_background(threads, server, [[index, 1]]) for index in range(1, 9)]
    wait_for_jobs(server, 4)
    wait_until(lambda: sum(answer.done() for answer in answers) == 4, 5)
    assert server.get("/health").status_code == 200
    # /health did not wait for an open request to end.
    assert sum(answer.done() for answer in answers) == 4
    statuses = sorted(answer.result(timeout=20).status_code for answer in answers)
    assert statuses == [200] * 4 + [429] * 4


def test_a_client_that_stalls_during_its_request_is_disconnected(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1, TITOPOOL_CLIENT_TIMEOUT_S="1")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        )
        # With or without a response, the server closes the connection.
        while client.recv(1000):
            pass
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]


def test_1000_requests_at_once_all_succeed_while_health_answers(start_stub, stub_server):
    start_stub(0, "--delay-s", "3", "--max-num-seqs", "2000")
    start_stub(1, "--delay-s", "3", "--max-num-seqs", "2000")
    server = stub_server(2, TITOPOOL_NUM_FRONT_ENDS="2")
    with concurrent.futures.ThreadPoolExecutor(1000) as pool:
        answers = [in_background(pool, server, [[index, 3]]) for index in range(1, 1001)]
        wait_until(lambda: sum(server.metrics("sequences").values()) > 0, 20)
        assert server.get("/health").status_code == 200
        # Some requests are still in flight.
        assert not all(answer.done() for answer in answers)
        for index, answer in enumerate(answers, start=1):
            body = answer.result(timeout=60).json()
            assert body.get("completion_ids") == [[3, index]], body


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_open_requests_get_an_answer_at_shutdown(start_stub, stub_server, threads, number):
    start_stub(0)
    server = stub_server(1, TITOPOOL_DRAIN_TIMEOUT_S="1")
    answer = in_background(threads, server, [[Fault.HANG]])
    wait_for_jobs(server, 1)
    server.process.send_signal(number)
    assert error_of(answer.result(timeout=10)) == (503, "no_ready_worker")
    server.process.wait(10)


def test_small_requests_pass_a_large_one_at_either_front_end(start_stub, stub_server, threads):
    for index in range(2):
        start_stub(index, "--delay-s", "0.3", "--max-num-seqs", "64", **QUICK)
    server = stub_server(2, TITOPOOL_NUM_FRONT_ENDS="2", **QUICK)
    # 17 rounds of the slots that are not kept.
    large = in_background(threads, server, [[1, 2]] * 2000, max_tokens=1000)
    wait_for_jobs(server, 2 * 63)
    for number in range(3, 9):
        assert server.generate([[number, 1]], max_tokens=1000)["completion_ids"] == [[1, number]]
    assert not large.done()
    assert large.result(timeout=30).json()["completion_ids"] == [[2, 1]] * 2000


def test_both_workers_share_the_jobs_of_one_request(start_stub, stub_server):
    # Two slots each: neither worker can take more than two jobs before the other has two.
    for index in range(2):
        start_stub(index, "--delay-s", "1", "--max-num-seqs", "2", **QUICK)
    server = stub_server(2)
    server.generate([[index, 1] for index in range(1, 9)])

    def done() -> list[float]:
        return list(server.metrics("completed_jobs_total").values())

    wait_until(lambda: sum(done()) == 8, 20)
    assert min(done()) >= 2


def pool_metric(server: Server, name: str) -> float | None:
    """A metric that has one value for all front ends."""
    lines = server.get("/metrics").text.splitlines()
    return next(
        (float(line.split()[-1]) for line in lines if line.startswith(f"titopool_{name} ")), None
    )


def test_any_front_end_has_the_metrics_of_the_whole_pool(start_stub, stub_server):
    for index in range(2):
        start_stub(index, **QUICK)
    server = stub_server(2, TITOPOOL_NUM_FRONT_ENDS="2", **QUICK)
    server.generate([[index, 1, 1] for index in range(1, 11)], n=2, max_tokens=2)
    server.post("/generate/", {"prompts": [[Fault.FAIL]]})

    # Each front end learns the counters from the next heartbeats.
    for name, value in {
        "completed_jobs_total": 10, "failed_jobs_total": 1, "prompt_tokens_total": 30,
        "completion_tokens_total": 40, "ready": 2, "sequences": 0,
    }.items():  # fmt: skip
        wait_until(lambda name=name, value=value: sum(server.metrics(name).values()) == value, 20)

    lists = b'{"prompts": [' + b"[]," * 600_000 + b"[]]}"
    assert requests.post(server.url + "/generate/", data=lists, timeout=60).status_code == 413

    def check_sums() -> None:
        for name, value in {
            "memory_budget_bytes": 2 * ServerConfig().memory_budget_bytes, "memory_taken_bytes": 0,
            'refused_requests_total{reason="body_too_large"}': 1,
            'refused_requests_total{reason="queue_full"}': 0,
        }.items():  # fmt: skip
            wait_until(lambda name=name, value=value: pool_metric(server, name) == value, 20)

    # Over both front ends, and those that have ended.
    check_sums()
    ended = psutil.Process(server.process.pid).children()
    for front_end in ended:
        front_end.kill()
    wait_until(lambda: not alive(ended), 10)
    server.wait_until_ready(2)
    check_sums()


def test_a_file_of_keys_is_followed_and_its_names_are_in_log_and_metrics(
    start_stub, stub_server, tmp_path: Path
):
    start_stub(0, **QUICK)
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("alice a-marked-key\nroot root-key admin\n")
    server = stub_server(
        1, "--api-key-file", str(keys), "--host", "0.0.0.0", "--log-level", "debug", **QUICK
    )
    assert "NO KEY IS SET" not in server.log

    def post(path: str, key: str, **body: object) -> requests.Response:
        return server.post(path, body, headers={"Authorization": f"Bearer {key}"})

    assert post("/generate/", "a-marked-key", prompts=[[1, 2, 3]] * 2).status_code == 200
    assert post("/generate/", "a-marked-key", prompts=[[Fault.FAIL]]).status_code == 500
    assert error_of(post("/pause", "a-marked-key")) == (401, "invalid_api_key")
    assert post("/pause", "root-key").status_code == 400
    assert "(key alice)" in server.log
    metric = 'titopool_worker_key_prompt_tokens_total{key="alice",worker="0"} 6.0'
    key = {"Authorization": "Bearer root-key"}
    wait_until(lambda: metric in server.get("/metrics", headers=key).text, 10)
    keys.write_text("bob b-marked-key\n")
    wait_until(lambda: post("/is_paused", "a-marked-key").status_code == 401, 10)
    wait_until(lambda: post("/generate/", "b-marked-key", prompts=[[1]]).status_code == 200, 10)
    assert "-marked-key" not in server.log


def test_a_server_without_a_key_says_who_may_use_it(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1, "--host", "0.0.0.0", "--num-front-ends", "1", "--log-level", "error")
    assert "NO KEY IS SET, and this server listens at 0.0.0.0" in server.log
    assert "api_key_file" in server.log
    # No header of a client moves a route.
    moved = {"SCRIPT_NAME": "/x", "Script-Name": "/x"}
    assert server.get("/live", headers=moved).status_code == 200
    for refused in (
        {"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"},
    ):  # fmt: skip
        answer = server.post("/generate/", {"prompts": [[1]]}, headers=refused)
        assert error_of(answer) == (403, "foreign_page")
