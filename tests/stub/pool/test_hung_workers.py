"""Workers whose process or event loop hangs: with a supervisor, alone, and as front ends see them."""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.servers import (
    REPOSITORY,
    Server,
    alive,
    environment,
    forked_server,
    kill_all,
    wait_until,
)
from harness.stub_worker import BLOCK_SIGNAL, HOLD_SIGNAL, Fault
from tests.conftest import StartStub
from tests.kit.peers.load import Load, has_phases
from tests.kit.workers.idle_worker import make_server
from titopool.settings.config import ServerConfig
from titopool.tracing import FLUSH_TIMEOUT_S
from workers.process import EXIT_HUNG, STACKS_SIGNAL
from workers.serving.server import CLOSE_TIMEOUT_S

STUB = f"{sys.executable} -m harness.stub_worker"
HANG_TIMEOUT_S = 2.5
QUICK = {
    "TITOPOOL_HEARTBEAT_INTERVAL_S": "0.2", "TITOPOOL_HEARTBEAT_TIMEOUT_S": "1.5",
    "TITOPOOL_WORKER_HANG_TIMEOUT_S": str(HANG_TIMEOUT_S),
}  # fmt: skip
# To notice a hang and to start a stub again, on a busy machine.
SLACK_S = 8.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hung")


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[Server]:
    """Two workers under a supervisor."""
    with forked_server(
        "--worker-command", f"{STUB} --delay-s 0.1",
        "--num-workers", "2", "--num-front-ends", "2", "--weights-root", str(run_dir),
        "--run-dir", str(run_dir), log=run_dir / "log", num_workers=2, **QUICK,
    ) as running:  # fmt: skip
        yield running


def worker_process(server: Server, name: str) -> psutil.Process:
    family = psutil.Process(server.process.pid).children(recursive=True)
    words = {one: one.cmdline() for one in family}
    (found,) = [
        one for one, has in words.items()
        if "harness.stub_worker" in has and has[has.index("--worker-id") + 1] == name
    ]  # fmt: skip
    return found


def num_hung(server: Server) -> int:
    """Restarts after a hang."""
    lines = server.get("/metrics").text.splitlines()
    found = [one for one in lines if one.startswith('titopool_worker_restarts_total{reason="hung"')]
    return sum(int(float(one.rpartition(" ")[2])) for one in found)


def only_refused(load: Load) -> bool:
    """Whether all requests were answered, but for those that came while no worker was there."""
    return all("no_ready_worker" in one for one in load.failed)


def test_workers_that_hang_are_restarted_and_all_requests_end(server: Server, run_dir: Path):
    """The process of one is stopped, and an extension of the other keeps Python's lock."""
    before, hung = num_hung(server), [worker_process(server, name) for name in "01"]
    with Load(server, 4) as load:
        wait_until(lambda: load.num_answered > 20, 10)
        began = time.monotonic()
        for one, number in zip(hung, (signal.SIGSTOP, HOLD_SIGNAL), strict=True):
            one.send_signal(number)
        wait_until(lambda: not alive(hung), HANG_TIMEOUT_S + SLACK_S, lambda: server.log)
        assert time.monotonic() - began > HANG_TIMEOUT_S - 0.5
        wait_until(lambda: has_phases(server, "ready", "ready"), 20, lambda: server.log)
    assert only_refused(load)
    wait_until(lambda: num_hung(server) >= before + 2, 10, lambda: server.get("/metrics").text)
    for one in server.get("/workers").json()["workers"]:
        assert "no sign of life" in one["last_end"]["reason"]
    # Its handler of the signal for stacks runs without Python's lock.
    assert "hold_python" in (run_dir / "worker-1.log").read_text()
    (run_dir / "one").mkdir()
    (run_dir / "one" / "weights").write_text("one")
    answer = server.post("/update_weights", {"path": str(run_dir / "one"), "policy": "keep"})
    assert (answer.status_code, answer.json().get("lost")) == (200, []), answer.text


def test_a_supervisor_that_was_suspended_with_its_workers_ends_none(server: Server):
    wait_until(lambda: has_phases(server, "ready", "ready"), 20)
    before, workers = num_hung(server), [worker_process(server, name) for name in "01"]
    family = [workers[0].parent(), *workers]
    for one in family:
        one.suspend()
    time.sleep(HANG_TIMEOUT_S + 1)
    for one in family:
        one.resume()
    time.sleep(1)
    assert alive(workers) == workers
    assert num_hung(server) == before


def test_a_prompt_that_hangs_its_workers_fails_and_the_log_says_where(server: Server):
    log_size = len(server.log)
    answer = server.post("/generate/", {"prompts": [[Fault.BLOCK]]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
    assert "2 workers died" in answer.json()["error"]["message"]
    text = f"expected {HANG_TIMEOUT_S:g} s at most (worker_hang_timeout_s)"
    wait_until(lambda: server.log[log_size:].count("in stand_still") == 2, 20, lambda: server.log)
    assert server.log[log_size:].count(text) == 2
    wait_until(lambda: server.log.count("the log has the stack; restarting") == 2, 10)


def test_a_worker_without_a_supervisor_ends_itself(start_stub: StartStub, tmp_path: Path):
    """Not one whose loop may stand for ever, nor one whose process was suspended, nor in its warm-up."""
    started = {}
    for index, (name, option, limit_s) in enumerate((
        ("hung", "--delay-s=0", HANG_TIMEOUT_S), ("never", "--delay-s=0", 0),
        ("suspended", "--delay-s=0", HANG_TIMEOUT_S),
        ("warming", f"--warm-s={HANG_TIMEOUT_S + 1}", HANG_TIMEOUT_S),
    )):  # fmt: skip
        settings = {**QUICK, "TITOPOOL_WORKER_HANG_TIMEOUT_S": str(limit_s)}
        started[name] = start_stub(index, option, "--ready-file", str(tmp_path / name), **settings)

    def is_alive(name: str) -> bool:
        """Whether its ready file is young, as probes see it."""
        file = tmp_path / name
        return file.exists() and time.time() - file.stat().st_mtime < 1

    wait_until(lambda: all(map(is_alive, started)), 10 + HANG_TIMEOUT_S)
    for name, number in (
        ("hung", BLOCK_SIGNAL), ("never", BLOCK_SIGNAL), ("suspended", signal.SIGSTOP)
    ):  # fmt: skip
        started[name].send_signal(number)
    assert started["hung"].wait(HANG_TIMEOUT_S + SLACK_S) == EXIT_HUNG
    time.sleep(0.5)
    assert not is_alive("suspended")
    started["suspended"].send_signal(signal.SIGCONT)
    time.sleep(1)
    assert [name for name, one in started.items() if one.poll() is None] == [
        "never", "suspended", "warming",
    ]  # fmt: skip
    assert all(map(is_alive, ("never", "suspended", "warming")))


# Ends with the code 3 if nothing else ends it.
STANDS = """
import logging, subprocess, sys, time
import workers.process
from workers.serving.watchdog import Watchdog
workers.process.END_TIMEOUT_S = 6
logging.basicConfig()
print(subprocess.Popen(["sleep", "60"], stdout=2, start_new_session=True).pid, flush=True)
Watchdog(0.05, on_turn=lambda stood_s: None, limit_s=lambda: 0.3).start()
if sys.argv[1] == "locked":
    logging.getLogger().handlers[0].acquire()
def stand_here():
    until = time.monotonic() + 15
    while time.monotonic() < until:
        # The sum keeps Python's lock for many of the watchdog's turns.
        sum(range(10_000_000)) if sys.argv[1] == "calls" else time.sleep(15)
stand_here()
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["free", "calls", "locked"])
def test_the_watchdog_ends_the_process_and_its_children(how: str, tmp_path: Path):
    """Also if the loop has a lock that logging needs, or Python's: then the log has all stacks."""
    with (tmp_path / "log").open("wb") as log:
        ended = subprocess.run(
            [sys.executable, "-c", STANDS, how],
            env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, timeout=20,
        )  # fmt: skip
    child = psutil.Process(int(ended.stdout))
    shown = (tmp_path / "log").read_text()
    try:
        assert ended.returncode == EXIT_HUNG, shown
        assert "stand_here" in shown
        assert how != "free" or "expected 0.3 s at most (worker_hang_timeout_s)" in shown
        wait_until(lambda: not alive([child]), 5)
    finally:
        kill_all([child])


def test_a_loop_may_stand_longer_while_it_loads_stops_or_updates(monkeypatch: pytest.MonkeyPatch):
    server = make_server(ServerConfig(worker_hang_timeout_s=5, weight_update_timeout_s=20))
    server._phase = "stopping"
    assert server._hang_limit_s() == math.inf
    server._facts = object()  # type: ignore[assignment]
    assert server._hang_limit_s() == 5 + CLOSE_TIMEOUT_S + FLUSH_TIMEOUT_S
    server._phase = "ready"
    assert server._hang_limit_s() == 5
    monkeypatch.setattr(type(server._control), "has_open_update", True)
    assert server._hang_limit_s() == 25


def test_a_process_shows_its_stacks_on_a_signal(start_stub: StartStub, tmp_path: Path):
    """It goes on afterwards."""
    ready = tmp_path / "ready"
    worker = start_stub(0, "--ready-file", str(ready))
    wait_until(ready.exists, 10)
    worker.send_signal(STACKS_SIGNAL)
    time.sleep(0.3)
    assert worker.poll() is None
