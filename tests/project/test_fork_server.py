"""Servers and stub workers in forks: how they end, and what a dead process that forks costs."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from harness.fork_server import Forked, ForkServer
from harness.servers import REPOSITORY, alive, environment, running_server, wait_until

BAD_WORDS = ["--endpoint", "ipc:///tmp/never", "--no-such-option"]


@pytest.fixture
def forks():
    made = ForkServer()
    yield made
    made.end()


def worker(forks: ForkServer, folder, **variables: str) -> Forked:
    words = ["--endpoint", f"ipc://{folder}/worker-{time.monotonic_ns()}"]
    return forks.start(
        "harness.stub_worker", words, environ=environment(**variables), folder=REPOSITORY
    )


def test_exit_codes_and_signals_are_those_of_the_process(forks, tmp_path):
    one, other = worker(forks, tmp_path), worker(forks, tmp_path)
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.05)
    one.kill()
    assert one.wait(30) == -signal.SIGKILL
    # It has a handler once it serves, which it says in no other way here.
    wait_until(lambda: other.send_signal(signal.SIGTERM) or other.poll() is not None, 30)
    assert other.returncode in (0, -signal.SIGTERM)
    with (tmp_path / "log").open("wb") as log:
        bad = forks.start(
            "harness.stub_worker", BAD_WORDS, environ=environment(), folder=tmp_path,
            output=log.fileno(),
        )  # fmt: skip
    assert bad.wait(30) == 2
    assert "--no-such-option" in (tmp_path / "log").read_text()


def test_a_fork_has_its_folder_its_environment_and_a_group(forks, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        one = forks.start(
            "titopool serve", ["--port", "none"], environ=environment(TITOPOOL_HOST="::1"),
            folder=tmp_path, output=log.fileno(),
        )  # fmt: skip
    assert one.wait(30) == 2
    assert "none" in (tmp_path / "log").read_text()
    other = worker(forks, tmp_path, ITS_OWN="yes")
    assert os.getpgid(other.pid) == other.pid
    assert psutil.Process(other.pid).cwd() == str(REPOSITORY)
    other.kill_group()


def test_the_forks_end_with_the_process_that_forks(forks, tmp_path):
    one = psutil.Process(worker(forks, tmp_path).pid)
    forks.end()
    wait_until(lambda: not alive([one]), 10)


def test_a_dead_process_that_forks_fails_the_test_that_has_a_fork_by_name(forks, tmp_path):
    one = worker(forks, tmp_path)
    forks._process.kill()
    with pytest.raises(AssertionError, match="the process that forks servers has ended"):
        one.kill_group()
    forks._process.wait(30)
    # The next one begins clean, and the suite lists why.
    with pytest.warns(RuntimeWarning, match="had ended with code -9"):
        other = worker(forks, tmp_path)
    other.kill_group()


def test_the_process_that_forks_outlives_a_child_that_is_no_fork():
    """An imported package may leave one."""
    code = (
        "import os, socket\n"
        "from harness.fork_server import _Parent\n"
        "parent = _Parent(socket.socketpair()[0])\n"
        "pid = os.fork() or os._exit(0)\n"
        "os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n"
        "parent._reap()\n"
        "print('goes on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "goes on\n", done.stderr


def test_a_number_that_another_process_has_by_now_is_not_killed(forks, tmp_path, monkeypatch):
    ended = worker(forks, tmp_path)
    ended.kill_group()
    # This process's number stands for one that was given again.
    monkeypatch.setattr(ended, "pid", os.getpid())
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append(pid))
    ended.kill_group()
    assert not killed


def test_a_child_that_outlives_the_group_is_named_and_ends(forks, tmp_path):
    one = worker(forks, tmp_path)
    # As a supervisor's workers have.
    away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    one.descendants = lambda: [psutil.Process(away.pid)]
    with pytest.raises(AssertionError, match="sleep"):
        one.kill_group(0.2)
    assert away.wait(30) == -signal.SIGKILL


def test_a_server_s_processes_have_the_parents_and_the_sessions_of_production(tmp_path):
    command = f"{sys.executable} -m harness.stub_worker"
    options = ("--worker-command", command, "--num-workers", "1", "--num-front-ends", "1")
    with running_server(*options, log=tmp_path / "log") as server:
        children = psutil.Process(server.process.pid).children()
        (supervisor,) = (one for one in children if "workers.supervisor" in one.cmdline())
        (worker,) = supervisor.children()
        assert worker.cmdline()[:3] == command.split()
        for one in (supervisor, worker):
            assert os.getsid(one.pid) == one.pid
            assert psutil.CONN_LISTEN not in {at.status for at in one.net_connections("tcp")}
        worker.kill()
        wait_until(lambda: "it was killed (SIGKILL)" in server.log, 20)
        wait_until(lambda: supervisor.children() not in ([], [worker]), 20)
        server.wait_until_ready()
