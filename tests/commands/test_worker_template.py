"""Workers are forks of a process that has imported vLLM; what a fork cannot be is a new interpreter."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from harness.servers import (
    REPOSITORY,
    STOP_TIMEOUT_S,
    Server,
    alive,
    environment,
    first_request,
    free_port,
    wait_until,
    wait_until_ended,
    worker_pids,
)
from tests.conftest import ENGINE_OPTIONS
from titopool.settings.config import ServerConfig
from titopool.settings.gpus import visible_gpus
from workers import template as worker_template
from workers.supervisor import forking
from workers.supervisor.forking import Template, reason_for_new_interpreters

KEY = "not-for-the-template"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A worker whose supervisor's process is no fork.

    By README's command in the checkout, which finds the sources without PYTHONPATH.
    """
    port, log = free_port(), tmp_path_factory.mktemp("template") / "log"
    variables = environment(
        TITOPOOL_MODEL=tiny_model, TITOPOOL_PORT=str(port), TITOPOOL_NUM_WORKERS="1",
        TITOPOOL_ENGINE_ARGS=" ".join(ENGINE_OPTIONS), TITOPOOL_API_KEY=KEY, TITOPOOL_ADMIN_KEY=KEY,
    )  # fmt: skip
    del variables["PYTHONPATH"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("gunicorn"), "app:create_app()"],
            env=variables, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    found = Server(process, f"http://127.0.0.1:{port}", log)
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


def kill(server: Server, process: psutil.Process) -> None:
    """Kills the worker or its engine, and waits until a new worker is ready."""
    num_ready = server.log.count("s in all)")
    process.kill()
    wait_until(lambda: server.get("/health").status_code == 503, 10)
    wait_until(lambda: server.log.count("s in all)") > num_ready, 60, lambda: server.log)
    server.wait_until_ready()


def greedy(server: Server) -> list[list[int]]:
    body = {"prompts": [[1, 2, 3]], "temperature": 0}
    answer = server.post("/generate/", body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer.json()["completion_ids"]


def test_the_output_of_vllm_s_import_is_not_on_the_screen(server: Server):
    assert "worker 0: importing" in server.log
    assert "worker 0 | " not in server.log


def test_a_worker_is_a_fork_and_a_child_of_the_supervisor(server: Server):
    assert (
        len(first_request(server.url, "-H", f"Authorization: Bearer {KEY}")["completion_ids"][0])
        == 8
    )
    before = greedy(server)
    template = template_of(server)
    worker = psutil.Process(worker_pids(server)[0])
    assert worker.parent() == template.parent()
    kill(server, next(one for one in worker.children() if "EngineCore" in " ".join(one.cmdline())))
    assert "restarting it" in server.log
    assert greedy(server) == before
    successor = psutil.Process(worker_pids(server)[0])
    assert successor != worker
    assert successor.parent() == template.parent()
    assert template_of(server) == template
    # The import of vLLM is most of a new interpreter's start, and the template's only work.
    assert cpu_s(successor) < 0.6 * cpu_s(template)


def test_the_template_has_no_key_and_no_connection(server: Server):
    template = template_of(server)
    supervisor = template.parent()
    assert supervisor is not None
    # Front ends need the keys; processes that run a model's code do not get them.
    for one in [supervisor, *supervisor.children(recursive=True)]:
        assert KEY not in " ".join(one.environ().values())
    run_dir = Path(supervisor.environ()["TITOPOOL_RUN_DIR"])
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert {"worker-0", "worker-0.log"} <= {one.name for one in run_dir.iterdir()}
    # Its standard ones, and the socket to the supervisor; on GPUs also what NVML leaves open.
    assert visible_gpus() or template.num_fds() == 4
    assert not template.net_connections("inet")


# `test_a_template_that_is_killed_is_begun_again` has its part of the supervisor.
@pytest.mark.variant
def test_a_dead_template_is_started_again(server: Server):
    template = template_of(server)
    template.kill()
    text = "the process that forks workers is started again: it ended with code -9"
    wait_until(lambda: text in server.log, 30, lambda: server.log)
    kill(server, psutil.Process(worker_pids(server)[0]))
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
    assert server.process.wait(STOP_TIMEOUT_S) == 1


def test_the_reasons_for_a_new_interpreter():
    assert not reason_for_new_interpreters({}, has_own_command=False, is_one_of_a_pool=False)
    assert "worker_command" in reason_for_new_interpreters(
        {}, has_own_command=True, is_one_of_a_pool=False
    )
    assert "several hosts" in reason_for_new_interpreters(
        {}, has_own_command=False, is_one_of_a_pool=True
    )
    bound = {"OMP_PLACES": "cores"}
    assert "OMP_PLACES" in reason_for_new_interpreters(
        bound, has_own_command=False, is_one_of_a_pool=False
    )


@pytest.mark.parametrize(
    "kinds, left_open, reason",
    [
        ({"A", "B"}, "", "of several kinds: A, B"),
        ({"A"}, "", "NVML or CUDA does not begin in a fork"),
        ({"A"}, "a-file", "left open: "),
    ],
)
def test_the_reasons_of_a_template_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: set[str], left_open: str, reason: str
):
    """As on a host with two GPUs, whose driver's library is not there."""
    with ExitStack() as stack:

        def imported(config: ServerConfig, *, on_cpu: bool) -> None:
            assert not on_cpu
            if left_open:
                stack.enter_context((tmp_path / left_open).open("w"))

        monkeypatch.setattr(worker_template, "visible_gpus", lambda: ["0", "1"])
        monkeypatch.setattr(worker_template, "import_vllm", imported)
        monkeypatch.setattr(worker_template, "kinds_of_gpus", lambda: kinds)
        monkeypatch.setattr(threading, "active_count", lambda: 1)
        before = worker_template._descriptors().keys()
        assert reason in worker_template._import(ServerConfig(), before)


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


def test_a_template_that_is_killed_is_begun_again(broken: Callable[[], Template], caplog):
    template = broken()
    first = template._process
    assert first is not None
    template._is_ready = True
    first.kill()
    wait_until(lambda: template.follow() or template._process is not first, 30)
    text = "the process that forks workers is started again: it ended with code -9"
    assert caplog.messages == [text]
    # It forks once it has imported vLLM.
    assert template.is_importing
    assert not template.forks({})


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
