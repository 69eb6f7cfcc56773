"""Workers that join and leave while the pool serves, with stub engines and two front ends."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from harness.servers import Server, alive, phases, wait_until
from tests.conftest import StartStub
from tests.kit.peers.load import Load, has_phases
from titopool.settings.config import ServerConfig
from workers.supervisor.supervisor import StartFailed, Supervisor

STUB = f"{sys.executable} -m harness.stub_worker"


# ---- a worker that is asked to leave -------------------------------------------------


@pytest.mark.parametrize("how", ["SIGTERM", "route"])
def test_a_worker_that_leaves_finishes_its_jobs_and_gets_no_more(
    start_stub: StartStub, stub_server, tmp_path: Path, how: str
):
    runs = tmp_path / "runs"
    words = ("--delay-s", "8", "--runs-file", str(runs))
    workers = [start_stub(index, *words, TITOPOOL_DRAIN_TIMEOUT_S="30") for index in range(2)]
    server = stub_server(2, "--num-front-ends", "2")
    wait_until(lambda: has_phases(server, "ready", "ready"), 5)
    answers: list[int] = []
    prompts = [[index, 7] for index in range(1, 9)]
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/generate/", {"prompts": prompts}).status_code)
    )
    thread.start()
    running = lambda: server.metrics("sequences")  # noqa: E731
    wait_until(lambda: sum(running().values()) == 8, 5, lambda: str(running()))
    # Two front ends may split them unevenly: the worker with more of them leaves.
    counts = running()
    other, leaving = sorted(("0", "1"), key=lambda name: counts[name])
    if how == "SIGTERM":
        workers[int(leaving)].send_signal(signal.SIGTERM)
    else:
        answer = server.post(f"/workers/{leaving}/drain", {})
        assert answer.status_code == 202
        assert answer.json() == {"worker": leaving, "phase": "draining"}
    expected = ["draining" if name == leaving else "ready" for name in ("0", "1")]
    wait_until(lambda: has_phases(server, *expected), 5, lambda: str(phases(server)))
    # Its jobs are not run again by the other worker.
    assert server.post("/generate/", {"prompts": [[5, 6]] * 4}).status_code == 200
    thread.join(60)
    assert answers == [200]
    assert workers[int(leaving)].wait(60) == 0
    assert len(runs.read_text().splitlines()) == 12
    wait_until(lambda: list(server.metrics("completed_jobs_total")) == [other], 5)
    assert "is lost with 0 open jobs: it was stopped" in server.log


def test_jobs_that_outlast_the_drain_run_again_elsewhere(start_stub: StartStub, stub_server):
    slow = start_stub(0, "--delay-s", "60", TITOPOOL_DRAIN_TIMEOUT_S="0.5")
    server = stub_server(2, num_ready=1)
    answers: list[int] = []
    body = {"prompts": [[1, 7], [2, 7]]}
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/generate/", body).status_code)
    )
    thread.start()
    wait_until(lambda: sum(server.metrics("sequences").values()) == 2, 5)
    start_stub(1)
    wait_until(lambda: phases(server) == ["ready", "ready"], 10)
    slow.send_signal(signal.SIGTERM)
    assert slow.wait(60) == 0
    thread.join(60)
    assert answers == [200]


def test_a_second_sigterm_ends_a_worker_at_once(start_stub: StartStub, stub_server):
    slow = start_stub(0, "--delay-s", "60", TITOPOOL_DRAIN_TIMEOUT_S="30")
    server = stub_server(1)
    thread = threading.Thread(target=lambda: server.post("/generate/", {"prompts": [[1, 7]]}))
    thread.daemon = True
    thread.start()
    wait_until(lambda: sum(server.metrics("sequences").values()) == 1, 5)
    slow.send_signal(signal.SIGTERM)
    wait_until(lambda: phases(server) == ["draining"], 5)
    assert slow.poll() is None
    slow.send_signal(signal.SIGTERM)
    assert slow.wait(60) == 0


def test_an_unknown_worker_is_refused_with_the_names(start_stub: StartStub, stub_server):
    start_stub(0)
    server = stub_server(1)
    answer = server.post("/workers/7/drain", {})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "worker_not_found"
    assert "expected the name of a worker (0), got '7'" in answer.text
    answer = server.post("/workers/scale", {"num_workers": 2})
    assert answer.status_code == 409
    assert "scale them where they run" in answer.text


# ---- the number of workers -----------------------------------------------------------


def test_a_pool_grows_and_shrinks_under_load_and_loses_and_repeats_no_request(
    start_forked, tmp_path: Path
):
    runs = tmp_path / "runs"
    server = start_forked(
        "--worker-command", f"{STUB} --delay-s 0.05 --runs-file {runs}", "--num-workers", "2",
        "--num-front-ends", "2",
    )  # fmt: skip
    server.wait_until_ready(2)
    with Load(server, with_streams=True) as load:
        answer = server.post("/workers/scale", {"num_workers": 4})
        assert (answer.status_code, answer.json()) == (202, {"num_workers": 4, "num_before": 2})
        delays = newcomers_delays(server, "2", "3")
        wait_until(lambda: has_phases(server, *["ready"] * 4), 20, lambda: server.log)
        server.post("/workers/scale", {"num_workers": 1})
        wait_until(lambda: has_phases(server, "ready"), 20, lambda: server.log)
    # A machine that stands still may hold up one of them.
    assert min(delays) < 1, delays
    assert load.failed == []
    assert load.num_answered > 50
    assert load.num_repeated(runs) == 0
    assert len(engines_of(server)) == 1


def newcomers_delays(server: Server, *names: str) -> list[float]:
    """Seconds from when a worker is ready until it has jobs, as /metrics shows both."""
    ready_at, busy_at = dict[str, float](), dict[str, float]()
    deadline = time.monotonic() + 60
    while len(busy_at) < len(names):
        assert time.monotonic() < deadline, server.log
        text, now = server.get("/metrics").text, time.monotonic()
        for name in names:
            if f'titopool_worker_ready{{worker="{name}"}} 1.0' in text:
                ready_at.setdefault(name, now)
            if re.search(rf'^titopool_worker_sequences{{worker="{name}"}} [1-9]', text, re.M):
                ready_at.setdefault(name, now)
                busy_at.setdefault(name, now)
        time.sleep(0.02)
    return [busy_at[name] - ready_at[name] for name in names]


def test_the_command_scales_a_server_and_waits_for_it(start_forked):
    server = start_forked("--worker-command", STUB, "--num-workers", "1", "--num-front-ends", "2")
    server.wait_until_ready(1)
    words = [sys.executable, "-m", "titopool.cli", "scale", "--url", server.url]
    for num_workers, text in ((3, "worker 2: ready"), (1, "worker 2: left")):
        done = subprocess.run(
            [*words, str(num_workers)], capture_output=True, text=True, timeout=90, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert text in done.stdout
        # The other front end hears of a worker within a heartbeat.
        phases = ["ready"] * num_workers
        wait_until(partial(has_phases, server, *phases), 10, lambda: server.log)


def test_a_worker_that_was_asked_to_leave_is_not_started_again(start_forked):
    server = start_forked("--worker-command", STUB, "--num-workers", "2")
    server.wait_until_ready(2)
    assert server.post("/workers/0/drain", {}).status_code == 202
    wait_until(lambda: phases(server) == ["ready"], 10, lambda: server.log)
    assert "worker 0 has left; 1 workers stay" in server.log
    # Its place is free for a worker that joins.
    server.post("/workers/scale", {"num_workers": 2})
    wait_until(lambda: phases(server) == ["ready", "ready"], 10, lambda: server.log)
    assert {one["worker"] for one in server.get("/ready").json()["workers"]} == {"0", "1"}


def test_a_worker_may_be_asked_to_leave_while_it_loads(start_forked, tmp_path: Path):
    """In the first start, too."""
    gate = tmp_path / "gate"
    server = start_forked("--worker-command", f"{STUB} --load-until {gate}", "--num-workers", "2")
    wait_until(
        lambda: server.is_listening() and phases(server) == ["loading", "loading"], 20,
        lambda: server.log,
    )  # fmt: skip
    assert server.post("/workers/0/drain", {}).status_code == 202
    wait_until(lambda: "worker 0 has left; 1 workers stay" in server.log, 10, lambda: server.log)
    gate.touch()
    wait_until(lambda: phases(server) == ["ready"], 10, lambda: server.log)
    assert "could not start" not in server.log


def test_a_worker_that_ends_by_sigterm_is_started_again(start_forked):
    server = start_forked("--worker-command", STUB)
    server.wait_until_ready()
    (first,) = engines_of(server)
    first.send_signal(signal.SIGTERM)
    wait_until(lambda: engines_of(server) not in ([], [first]), 10)
    wait_until(lambda: phases(server) == ["ready"], 10)
    assert "worker 0 was asked to end" in server.log


def test_prompts_that_wait_start_workers_and_idle_ones_leave(start_forked):
    server = start_forked(
        "--worker-command", f"{STUB} --delay-s 0.2 --max-num-seqs 2", "--num-workers", "1..3",
        "--scale-up-after-s", "0.5", "--scale-down-after-s", "1", "--num-front-ends", "2",
    )  # fmt: skip
    server.wait_until_ready()
    with Load(server, 12) as load:
        wait_until(lambda: has_phases(server, *["ready"] * 3), 30, lambda: server.log)
    wait_until(lambda: has_phases(server, "ready"), 30, lambda: server.log)
    assert load.failed == []


def supervisor_of(server: Server) -> int:
    """Its process id."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = [one.pid for one in family if "workers.supervisor" in one.cmdline()]
    return found


def has_logged(server: Server, text: str, num_times: int) -> bool:
    return server.log.count(text) == num_times


def test_a_file_that_cannot_be_written_ends_nothing(start_forked, tmp_path: Path):
    """Workers join and leave once it can be; a folder in its place refuses it, as a full disk does."""
    server = start_forked(
        "--worker-command", STUB, "--num-workers", "1", "--num-front-ends", "1",
        "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    server.wait_until_ready()
    drafts = tmp_path / "run" / f"endpoints.{supervisor_of(server)}"
    late = "when there is space in run_dir"
    for num_times, num_workers in enumerate((2, 1), 1):
        drafts.mkdir()
        assert server.post("/workers/scale", {"num_workers": num_workers}).status_code == 202
        wait_until(partial(has_logged, server, late, num_times), 20, lambda: server.log)
        time.sleep(0.5)
        assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]
        drafts.rmdir()
        expected = ["ready"] * num_workers
        wait_until(lambda expected=expected: phases(server) == expected, 20, lambda: server.log)
    # The reason stands there once for each.
    assert has_logged(server, late, 2)
    (tmp_path / "run" / f"num-workers.{server.get('/live').json()['pid']}").mkdir()
    answer = server.post("/workers/scale", {"num_workers": 2})
    assert answer.status_code == 500
    assert "make space on the server's disk" in answer.json()["error"]["message"]


def test_a_worker_whose_process_cannot_be_started_is_tried_again(tmp_path: Path, caplog):
    config = ServerConfig(run_dir=str(tmp_path), num_workers=1)
    command = (str(tmp_path / "no-such-command"),)
    supervisor = Supervisor(config, parent_pid=os.getppid(), url=None, worker_command=command)
    num_open = len(os.listdir("/proc/self/fd"))
    worker = supervisor._add_worker(is_added=True)
    supervisor._start(worker)
    assert "worker 1 did not start: its process cannot be started: " in caplog.text
    assert worker.process is None
    assert worker.start_after > time.monotonic()
    assert len(os.listdir("/proc/self/fd")) == num_open
    # One of the first workers stops the start, with the cause.
    with pytest.raises(StartFailed, match="no-such-command"):
        supervisor._start(supervisor._workers[0])


def engines_of(server: Server) -> list[psutil.Process]:
    children = alive(psutil.Process(server.process.pid).children(recursive=True))
    found = []
    for one in children:
        with suppress(psutil.NoSuchProcess):
            if "harness.stub_worker" in one.cmdline():
                found.append(one)
    return found


# ---- a front end that ends -----------------------------------------------------------


@pytest.mark.parametrize("has_more_front_ends", [False, True])
def test_sigterm_lets_open_requests_and_streams_finish_while_ready_says_503(
    start_stub: StartStub, stub_server, has_more_front_ends: bool
):
    start_stub(0, "--delay-s", "4")
    front_ends = "2" if has_more_front_ends else "1"
    server = stub_server(1, "--num-front-ends", front_ends, TITOPOOL_DRAIN_TIMEOUT_S="30")
    with ThreadPoolExecutor(16) as pool:
        bodies = [{"prompt": [n], "max_tokens": 1, "stream": n % 2 == 0} for n in range(1, 9)]
        answers = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        wait_until(lambda: sum(server.metrics("sequences").values()) == 8, 5)
        server.process.send_signal(signal.SIGTERM)
        # The front ends get the signal one after the other.
        probes = ("/ready", "/health") * 8
        wait_until(lambda: all(server.get(one).status_code == 503 for one in probes), 5)
        body = server.get("/ready").json()
        assert (body["ready"], body["draining"], body["num_ready"]) == (False, True, 1)
        assert server.get("/live").status_code == 200
        assert [one.result(60).status_code for one in answers] == [200] * 8
        assert all("DONE" in one.result().text for one in answers[1::2])
    assert server.process.wait(60) == 0


def test_requests_that_outlast_the_drain_get_an_answer(start_stub: StartStub, stub_server):
    start_stub(0, "--delay-s", "60")
    server = stub_server(1, TITOPOOL_DRAIN_TIMEOUT_S="1")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate/", {"prompts": [[1, 7]]})
        wait_until(lambda: sum(server.metrics("sequences").values()) == 1, 5)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result(60).status_code == 503
        assert "the server is stopping" in answer.result().text
    assert server.process.wait(60) == 0


def test_a_rolling_restart_under_load_loses_and_repeats_no_request(
    start_stub: StartStub, start_forked, tmp_path: Path
):
    words = ("--delay-s", "0.05", "--runs-file", str(tmp_path / "runs"))
    workers = [start_stub(index, *words) for index in range(2)]
    endpoints = ",".join(f"ipc://{tmp_path}/worker-{index}" for index in range(2))
    start = lambda: start_forked("--endpoints", endpoints, TITOPOOL_DRAIN_TIMEOUT_S="30")  # noqa: E731
    pool = Balancer([start(), start()])
    for server in pool.servers:
        server.wait_until_ready(2)
    with Load(pool, with_streams=True) as load:
        for place in range(2):
            old, new = pool.servers[place], start()
            new.wait_until_ready(2)
            pool.servers[place] = new
            old.process.send_signal(signal.SIGTERM)
            assert old.process.wait(60) == 0
            workers[place].send_signal(signal.SIGTERM)
            assert workers[place].wait(60) == 0
            workers[place] = start_stub(place, *words)
            for server in pool.servers:
                if server.process.poll() is None:
                    server.wait_until_ready(2)
    assert load.failed == []
    assert load.num_repeated(tmp_path / "runs") == 0
    assert load.num_answered > 50


class Balancer:
    """Sends each request to one of the servers that are in service when it is sent."""

    def __init__(self, servers: list[Server]):
        self.servers = servers
        self._turns = itertools.count()

    def post(self, path: str, json: Any) -> requests.Response:
        return self.servers[next(self._turns) % len(self.servers)].post(path, json)


# ---- endpoints in a file -------------------------------------------------------------


def test_workers_join_and_leave_with_the_lines_of_a_file(
    start_stub_at, start_forked, tmp_path: Path
):
    endpoints, key = tmp_path / "workers", tmp_path / "curve"
    first, second = (f"ipc://{tmp_path}/w{index}" for index in range(2))
    start_stub_at(first, "--worker-id", "0")
    endpoints.write_text(f"# host-a\n{first}\nno endpoint\n")
    server = start_forked(
        "--endpoints", f"file:{endpoints}", "--curve-key-file", str(key), "--num-front-ends", "2"
    )
    wait_until(lambda: server.is_listening() and has_phases(server, "ready"), 20)
    assert "expected lines tcp://host:port, got 'no endpoint'" in server.log
    worker = start_stub_at(second, "--worker-id", "1")
    endpoints.write_text(f"{first}\n{second}\n")
    wait_until(lambda: has_phases(server, "ready", "ready"), 5)
    endpoints.write_text(f"{first}\n")
    # It answers, so it stays, at each front end.
    wait_until(lambda: has_phases(server, "ready", "ready"), 5)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    wait_until(lambda: has_phases(server, "ready"), 5)


def test_a_request_may_come_just_before_its_front_end_knows_a_worker(
    start_stub: StartStub, stub_server, tmp_path: Path
):
    endpoints, key = tmp_path / "endpoints", tmp_path / "curve"
    endpoints.touch()
    start_stub(0)
    server = stub_server(
        0, "--endpoints", f"file:{endpoints}", "--curve-key-file", str(key), "--num-front-ends", "2",
        "--heartbeat-interval-s", "0.2", num_ready=0,
    )  # fmt: skip
    body = {"prompts": [[1, 2]], "max_tokens": 2}
    with ThreadPoolExecutor() as threads:
        send = lambda: [threads.submit(server.post, "/generate/", body) for _ in range(8)]  # noqa: E731
        assert {one.result().status_code for one in send()} == {503}
        pending = send()
        endpoints.write_text(f"ipc://{tmp_path}/worker-0\n")
        assert {one.result().status_code for one in pending} == {200}
