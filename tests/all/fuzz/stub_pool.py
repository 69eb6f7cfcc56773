"""Stub workers behind two gunicorn processes; a test can call each front end separately."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests

from harness.servers import REPOSITORY, Server, environment, free_port, kill_all, wait_until
from tests.all.fuzz.exploring import ServerGone
from tests.all.fuzz.stub import RUNNING
from titopool.settings.config import ENV_PREFIX

# Connections to each front end, and so the most calls in flight there.
NUM_CONNECTIONS = 4


class FrontEnd:
    """One gunicorn process, reached by connections that it has accepted."""

    def __init__(self, url: str, pid: int):
        self._url = url
        self.pid = pid
        self.sessions: list[requests.Session] = []
        self._lock = threading.Lock()

    def call(self, method: str, path: str, body: Any = None, *, within_s: float) -> Any:
        """The response of this front end.

        Raises:
            ServerGone: no response in time, or no connection.
        """
        with self._lock:
            session = self.sessions.pop()
        try:
            return session.request(method, self._url + path, json=body, timeout=within_s)
        except requests.RequestException as error:
            raise ServerGone(f"{method} {path} {body}: {error!r}") from error
        finally:
            with self._lock:
                self.sessions.append(session)


class StubPool:
    """A server, its worker processes, and each of its front ends."""

    def __init__(self, server: Server, workers: list[subprocess.Popen[bytes]], run_dir: Path):
        self.server = server
        self.workers = workers
        self._run_dir = run_dir
        self.front_ends = self._connect()

    def _connect(self) -> list[FrontEnd]:
        found: dict[int, FrontEnd] = {}
        pids = {one.pid for one in psutil.Process(self.server.process.pid).children()}

        def has_all_connections() -> bool:
            session = requests.Session()
            pid = session.get(self.server.url + "/live", timeout=10).json()["pid"]
            one = found.setdefault(pid, FrontEnd(self.server.url, pid))
            if len(one.sessions) < NUM_CONNECTIONS:
                one.sessions.append(session)
            else:
                session.close()
            return found.keys() == pids and all(
                len(one.sessions) == NUM_CONNECTIONS for one in found.values()
            )

        wait_until(
            has_all_connections,
            30,
            lambda: str({pid: len(one.sessions) for pid, one in found.items()}),
        )
        return [found[pid] for pid in sorted(found)]

    def paused_engines(self) -> list[bool]:
        """Whether each worker's engine is paused, as the engine reports."""
        return [self.state_file(index).read_text() != RUNNING for index in range(len(self.workers))]

    def state_file(self, index: int) -> Path:
        return self._run_dir / f"state-{index}"

    def check_processes(self) -> None:
        """Raises ServerGone if a process has ended."""
        for process in (self.server.process, *self.workers):
            if process.poll() is not None:
                raise ServerGone(f"{process.args} has ended: {self.server.log[-3000:]}")
        pids = {one.pid for one in psutil.Process(self.server.process.pid).children()}
        if pids != {one.pid for one in self.front_ends}:
            raise ServerGone(f"a front end has ended: {self.server.log[-3000:]}")


def start_worker(
    run_dir: Path, index: int, *arguments: str, **settings: str
) -> subprocess.Popen[bytes]:
    """Starts a stub worker at `worker-<index>`."""
    command = [
        sys.executable, "-m", "tests.all.fuzz.stub", "--endpoint", f"ipc://{run_dir}/worker-{index}",
        "--worker-id", str(index), *arguments,
    ]  # fmt: skip
    variables = {ENV_PREFIX + name.upper(): value for name, value in settings.items()}
    state_file = str(run_dir / f"state-{index}")
    env = environment(FUZZ_STATE_FILE=state_file, **variables)
    with (run_dir / f"worker-{index}.log").open("wb") as log:
        return subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=log, stderr=log)


@contextmanager
def stub_pool(
    run_dir: Path,
    *arguments: str,
    num_workers: int,
    num_endpoints: int | None = None,
    **settings: str,
) -> Iterator[StubPool]:
    """Starts a pool; `settings` apply to workers and front ends.

    Args:
        arguments: of the workers.
        num_endpoints: endpoints that the front ends connect to, if more than there are workers.
    """
    workers = [start_worker(run_dir, index, *arguments, **settings) for index in range(num_workers)]
    endpoints = [f"ipc://{run_dir}/worker-{i}" for i in range(num_endpoints or num_workers)]
    port = free_port()
    settings |= {"endpoints": ",".join(endpoints), "port": str(port), "num_front_ends": "2"}
    command = [
        sys.executable, "-m", "gunicorn", "-c", "python:app.gunicorn_hooks",
        "tests.all.fuzz.front_end:create_app()",
    ]  # fmt: skip
    variables = {ENV_PREFIX + name.upper(): value for name, value in settings.items()}
    log = run_dir / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(**variables), cwd=REPOSITORY, stdout=output, stderr=output
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_until_ready(num_workers)
        yield StubPool(server, workers, run_dir)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        for one in (process, *workers):
            one.terminate()
        try:
            for one in (process, *workers):
                one.wait(10)
        finally:
            for one in (process, *workers):
                one.kill()
            kill_all(children)
