"""Workers are forks of a process that has imported vLLM; what a fork cannot be is a new interpreter."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.servers import (
    Server,
    alive,
    environment,
    serve_process,
    wait_until,
    wait_until_ended,
    worker_pids,
)
from tests.conftest import ENGINE_OPTIONS
from titopool.settings.gpus import visible_gpus
from workers.supervisor import forking
from workers.supervisor.forking import Template, reason_for_new_interpreters

KEY = "not-for-the-template"
pytestmark = pytest.mark.skipif(bool(visible_gpus()), reason="with GPUs workers are no forks")


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A worker whose supervisor's process is no fork."""
    log = tmp_path_factory.mktemp("template") / "log"
    process, url = serve_process(tiny_model, *ENGINE_OPTIONS, log=log, TITOPOOL_API_KEY=KEY)
    found = Server(process, url, log)
    try:
        wait_until(lambda: "titopool serves" in found.log, 120, lambda: found.log)
        yield found
    finally:
        process.kill()
        process.wait()


def template_of(server: Server) -> psutil.Process:
    (found,) = (
        one
        for one in psutil.Process(server.process.pid).children(recursive=True)
        if one.cmdline()[1:3] == ["-m", "workers.template"]
    )
    return found


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its descendants."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in family)


def kill_worker(server: Server) -> None:
    """Kills the worker, and waits until its successor is ready."""
    num_ready = server.log.count("s in all)")
    os.kill(worker_pids(server)[0], signal.SIGKILL)
    wait_until(lambda: server.log.count("s in all)") > num_ready, 60, lambda: server.log)


def test_a_worker_is_a_fork_and_a_child_of_the_supervisor(server: Server):
    template = template_of(server)
    worker = psutil.Process(worker_pids(server)[0])
    assert worker.parent() == template.parent()
    kill_worker(server)
    successor = psutil.Process(worker_pids(server)[0])
    assert successor.parent() == template.parent()
    assert template_of(server) == template
    # The import of vLLM is most of a new interpreter's start, and the template's only work.
    assert cpu_s(successor) < 0.6 * cpu_s(template)


def test_the_template_has_no_key_and_no_connection(server: Server):
    template = template_of(server)
    assert KEY not in " ".join(template.environ().values())
    assert KEY not in " ".join(psutil.Process(worker_pids(server)[0]).environ().values())
    # Its standard ones, and the socket to the supervisor.
    assert template.num_fds() == 4
    assert not template.net_connections("inet")


def test_a_dead_template_is_started_again(server: Server):
    template = template_of(server)
    template.kill()
    text = "the process that forks workers is started again: it ended with code -9"
    wait_until(lambda: text in server.log, 30, lambda: server.log)
    kill_worker(server)
    assert template_of(server) != template
    assert psutil.Process(worker_pids(server)[0]).parent() == template_of(server).parent()


def test_nothing_outlives_a_killed_supervisor(server: Server):
    template = template_of(server)
    supervisor = template.parent()
    assert supervisor is not None
    left = [template, *supervisor.children(recursive=True)]
    supervisor.kill()
    wait_until_ended(left)
    assert not alive(left)


def test_the_reasons_for_a_new_interpreter():
    assert not reason_for_new_interpreters({}, [], has_own_command=False, is_one_of_a_pool=False)
    assert "worker_command" in reason_for_new_interpreters(
        {}, [], has_own_command=True, is_one_of_a_pool=False
    )
    assert "several hosts" in reason_for_new_interpreters(
        {}, [], has_own_command=False, is_one_of_a_pool=True
    )
    assert "GPUs" in reason_for_new_interpreters(
        {}, ["0"], has_own_command=False, is_one_of_a_pool=False
    )
    bound = {"OMP_PLACES": "cores"}
    assert "OMP_PLACES" in reason_for_new_interpreters(
        bound, [], has_own_command=False, is_one_of_a_pool=False
    )


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Callable[[], Template]]:
    """A template that cannot import vLLM."""
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM')")
    made: list[Template] = []

    def make() -> Template:
        made.append(Template(environment(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1"), 60.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until_it_is_ready_or_given_up(template: Template) -> None:
    deadline = time.monotonic() + 60
    while template.is_importing:
        assert time.monotonic() < deadline
        template.follow()
        time.sleep(0.01)


def test_a_template_that_cannot_import_says_why_and_is_given_up(
    broken: Callable[[], Template], caplog
):
    template = broken()
    assert template.is_importing
    until_it_is_ready_or_given_up(template)
    assert not template.forks({})
    (line,) = caplog.messages
    assert line == "from here on each worker starts a new interpreter: ImportError: no vLLM"


def test_a_template_that_does_not_fork_is_begun_again_once(
    broken: Callable[[], Template], caplog, monkeypatch
):
    """It is stopped, so its answer is late. The caller starts a new interpreter instead."""
    monkeypatch.setattr(forking, "FORK_TIMEOUT_S", 0.1)
    template = broken()
    status_read, status = os.pipe()
    for _ in range(2):
        assert template._process is not None
        template._process.send_signal(signal.SIGSTOP)
        template._is_ready = True
        assert template.fork(["--endpoint", "ipc://x"], {}, [], status) is None
        assert not template.forks({})
    assert not template.is_importing
    assert [one.partition(": no fork")[0] for one in caplog.messages] == [
        "the process that forks workers is started again",
        "from here on each worker starts a new interpreter",
    ]
    os.close(status)
    os.close(status_read)


def test_a_fork_whose_pid_came_too_late_is_ended(broken: Callable[[], Template]):
    template = broken()
    late = subprocess.Popen(["sleep", "1000"])
    template._control.close()
    template._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(str(late.pid).encode())
        template.close()
        assert not psutil.pid_exists(late.pid)
        with pytest.raises(BrokenPipeError):
            theirs.send(b"1")
    late.wait()


def test_other_variables_of_the_import_need_a_new_interpreter(
    broken: Callable[[], Template], caplog
):
    template = broken()
    caplog.set_level("INFO")
    template._is_ready = True
    assert template.forks(
        {"VLLM_PORT": "20000", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert not template.forks({"OMP_NUM_THREADS": "2"})
    assert "a new interpreter: OMP_NUM_THREADS differ" in caplog.text
