"""What a fork of a worker, as vLLM's engine process is on CPUs, does not share with it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from harness.servers import REPOSITORY, environment, free_port, wait_until

# A worker in whose thread a process is forked. `PARENT` and `CHILD` are code.
SCRIPT = """
import asyncio, logging, os, signal, sys, threading, time
from workers.forks import part_forks
from workers.supervisor.phase_pipe import PhaseReporter
from titopool.settings.logs import configure_logging

def say(text):
    os.write(1, (text + "\\n").encode())

report = PhaseReporter("0", int(sys.argv[1]))
configure_logging("info", report.log_handler())
logger = logging.getLogger("workers.test")
part_forks(report.let_go)

def fork():
    if os.fork() == 0:
        CHILD
        os._exit(0)

async def main():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, say, "the worker's handler")
    PARENT
    thread = threading.Thread(target=fork)
    thread.start()
    await asyncio.sleep(60)

asyncio.run(main())
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the script; its status pipe is the second attribute of the answer."""
    started: list[subprocess.Popen[str]] = []

    def run(*, parent: str = "pass", child: str, status_fd: int) -> subprocess.Popen[str]:
        script = SCRIPT.replace("PARENT", parent).replace("CHILD", child)
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(status_fd)], env=environment(), cwd=REPOSITORY,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(status_fd,),
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        # The children, too.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.fixture
def status() -> Iterator[tuple[int, int]]:
    """The pipe of a worker's reports: its ends to read and to write."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_signal_to_a_fork_is_not_the_worker_s(start: Start, status: tuple[int, int]):
    child = (
        "signal.signal(signal.SIGTERM, lambda *_: say('the fork')); say(str(os.getpid())); "
        "time.sleep(1); say('end')"
    )
    worker = start(child=child, status_fd=status[1])
    assert worker.stdout is not None
    os.kill(int(worker.stdout.readline()), signal.SIGTERM)
    assert [worker.stdout.readline() for _ in range(2)] == ["the fork\n", "end\n"]


def test_a_fork_without_handlers_ends_by_sigterm(start: Start, status: tuple[int, int]):
    child = "say(str(os.getpid())); time.sleep(60)"
    worker = start(child=child, status_fd=status[1])
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: state_of(pid) == "Z", 5)


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_the_port_is_free_when_only_a_fork_is_left(start: Start, status: tuple[int, int]):
    port = free_port()
    parent = (
        "import zmq; socket = zmq.Context().socket(zmq.ROUTER); "
        f"socket.bind('tcp://127.0.0.1:{port}'); say('bound')"
    )
    worker = start(parent=parent, child="say('forked'); time.sleep(60)", status_fd=status[1])
    assert worker.stdout is not None
    assert [worker.stdout.readline() for _ in range(2)] == ["bound\n", "forked\n"]
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))
    worker.kill()
    worker.wait(60)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_fork_keeps_pairs_of_sockets(start: Start, status: tuple[int, int]):
    parent = "import socket; global pair; pair = socket.socketpair()"
    child = "pair[1].send(b'1'); say(repr(pair[0].recv(1)))"
    worker = start(parent=parent, child=child, status_fd=status[1])
    assert worker.stdout is not None
    assert worker.stdout.readline() == "b'1'\n"


def test_a_fork_logs_to_standard_error_whoever_held_the_lock(start: Start, status: tuple[int, int]):
    worker = start(
        parent="report._lock.acquire()",
        child="logger.warning('from the fork'); say('done')",
        status_fd=status[1],
    )
    assert worker.stdout is not None
    assert worker.stderr is not None
    assert worker.stdout.readline() == "done\n"
    assert worker.stderr.readline().endswith("workers.test: from the fork\n")
