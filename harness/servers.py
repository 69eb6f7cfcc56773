"""Starts real servers for tests, and stops all of their processes."""

import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from harness.fork_server import Forked, alive, engine_fork_server, fork_server
from titopool.settings.gpus import visible_gpus

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 50.0
# The CI machine stands still for as long at times.
STALL_S = 30.0
# For a server of a tiny model: room for 65,536 tokens. vLLM zeroes the memory, so the default of 1 GiB
# takes 1 to 2 s of CPU time more.
KV_CACHE = ("--kv-cache-memory-bytes", str(2**28))
REPOSITORY = Path(__file__).resolve().parent.parent
# The command as pip installs it.
TITOPOOL = str(Path(sys.executable).with_name("titopool"))


class Server:
    """A running server, with the calls that tests make.

    Args:
        is_peer: another project's, whose answers do not follow our `/openapi.json`.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | Forked,
        url: str,
        log: Path,
        num_workers: int = 1,
        *,
        is_peer: bool = False,
    ):
        self.process = process
        self.url = url
        self.log_file = log
        self.num_workers = num_workers
        self._is_peer = is_peer

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def post(self, path: str, json: Any, **options: Any) -> requests.Response:
        return self._call("POST", path, json=json, timeout=120, **options)

    def get(self, path: str, **options: Any) -> requests.Response:
        return self._call("GET", path, timeout=30, **options)

    def _call(self, method: str, path: str, **options: Any) -> requests.Response:
        answer = requests.request(method, self.url + path, **options)
        if not self._is_peer and not options.get("stream"):
            # Not at the top: a process that only needs this module and runs vLLM must not import
            # Flask, whose proxies fail where torch inspects each module's globals.
            from harness.api_schemas import check_json_answer

            check_json_answer(answer)
        return answer

    def generate(self, prompts: Any, **fields: Any) -> dict[str, Any]:
        """The response of /generate/; the status must be 200."""
        answer = self.post("/generate/", {"prompts": prompts, **fields})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def metrics(self, name: str) -> dict[str, float]:
        """A metric's value for each worker, e.g. `metrics("completed_jobs_total")`."""
        found = re.findall(
            rf'^titopool_worker_{name}{{worker="(.*)"}} (\S+)$', self.get("/metrics").text, re.M
        )
        return {worker: float(value) for worker, value in found}

    def is_listening(self) -> bool:
        """Whether a front end answers at all."""
        try:
            return self.get("/live").status_code == 200
        except requests.RequestException:
            return False

    def wait_until_ready(self, num_workers: int = 1) -> None:
        wait_until(lambda: self._num_ready() >= num_workers, START_TIMEOUT_S, self._explain)

    def _num_ready(self) -> int:
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended: {self._explain()}")
        try:
            return int(self.get("/ready").json()["num_ready"])
        except requests.RequestException:
            # The server does not listen yet.
            return -1

    def _explain(self) -> str:
        return self.log[-4000:]


def first_request(url: str, *options: str) -> dict[str, Any]:
    """The answer to README's first request: its command, with the server's URL and curl's `options`."""
    found = re.search(
        r"^```sh\n(curl .*?)^```$", (REPOSITORY / "README.md").read_text(), re.M | re.S
    )
    assert found is not None
    command = found[1].replace("http://127.0.0.1:8000", url)
    done = subprocess.run(
        ["bash", "-euc", command.replace("curl -s", f"curl -sSf {shlex.join(options)}")],
        timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def wait_until(
    condition: Callable[[], object], within_s: float, explain: Callable[[], str] = str
) -> None:
    """Returns once `condition` holds; fails the test when it does not in time.

    `within_s` is for a machine that runs all the time; one of CI may stand for `STALL_S`.
    """
    deadline = time.monotonic() + within_s + STALL_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s + STALL_S} s: {explain()}"
        time.sleep(0.05)


def need_gpus(num_gpus: int) -> None:
    """Skips the test on a machine that has GPUs, but fewer than `num_gpus`."""
    if 0 < len(visible_gpus()) < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs, or none")


def free_port() -> int:
    """A port that was free a moment ago; gunicorn reports it if another process has taken it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without titopool's settings, plus `variables`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TITOPOOL_")}
    kept["PYTHONPATH"] = os.pathsep.join(
        filter(None, (variables.pop("PYTHONPATH", ""), str(REPOSITORY), kept.get("PYTHONPATH", "")))
    )
    return {**kept, **variables}


def serve_process(
    *arguments: str,
    log: Path,
    port: int | None = None,
    folder: Path = REPOSITORY,
    num_descriptors: int | None = None,
    **variables: str,
) -> tuple[subprocess.Popen[bytes], str]:
    """Starts `titopool serve` in `folder` without waiting; returns the process and the URL."""
    words, url = _words(arguments, port or free_port())
    limit = f"ulimit -n {num_descriptors}; " if num_descriptors else ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", limit + 'exec "$@"', "-", TITOPOOL, "serve", *words],
            stdout=output, stderr=subprocess.STDOUT, env=environment(**variables), cwd=folder,
        )  # fmt: skip
    return process, url


def fork_server_process(
    *arguments: str, log: Path, port: int | None = None, **variables: str
) -> tuple[Forked, str]:
    """As `serve_process`, as a fork of a process that has imported what a server needs.

    With a model, the first of `arguments`, that process has imported vLLM too.
    """
    words, url = _words(arguments, port or free_port())
    forks = fork_server if arguments[0].startswith("--") else engine_fork_server
    with log.open("wb") as output:
        process = forks.start(
            "titopool serve", words, environ=environment(**variables), folder=REPOSITORY,
            output=output.fileno(),
        )  # fmt: skip
    return process, url


def _words(arguments: Sequence[str], port: int) -> tuple[list[str], str]:
    """The words after `titopool serve`, and the URL."""
    return [*arguments, "--port", str(port)], f"http://127.0.0.1:{port}"


@contextmanager
def running_server(
    *arguments: str, log: Path, num_workers: int = 1, **variables: str
) -> Iterator[Server]:
    """A server whose workers are ready; asserts afterwards that all its processes have ended.

    It is a fork, except on GPUs, where the process of the tests may have begun CUDA.
    """
    start = serve_process if visible_gpus() else fork_server_process
    process, url = start(*arguments, log=log, **variables)
    server = Server(process, url, log, num_workers)
    descendants: list[psutil.Process] = []
    try:
        server.wait_until_ready(num_workers)
        descendants = psutil.Process(process.pid).children(recursive=True)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
            wait_until_ended(descendants)
        finally:
            process.kill()
            kill_all(descendants)


@contextmanager
def stub_worker(endpoint: str, *arguments: str, **variables: str) -> Iterator[Forked]:
    """A worker with a stub engine, in a fork; it is killed afterwards."""
    process = fork_server.start(
        "harness.stub_worker", ["--endpoint", endpoint, *arguments],
        environ=environment(**variables), folder=REPOSITORY,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill_group()


@contextmanager
def forked_server(
    *arguments: str, log: Path, num_workers: int = 1, **variables: str
) -> Iterator[Server]:
    """A server with workers of their own, in a fork; it is killed afterwards."""
    process, url = fork_server_process(*arguments, log=log, **variables)
    try:
        server = Server(process, url, log, num_workers)
        server.wait_until_ready(num_workers)
        yield server
    finally:
        process.kill_group()


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


def wait_until_ended(processes: list[psutil.Process]) -> None:
    """Returns once none of the processes runs; fails the test when one still runs after 10 s."""
    wait_until(lambda: not alive(processes), 10, lambda: str(alive(processes)))


def ipv6_listener() -> socket.socket:
    """A socket that listens at ::1; skips the test where IPv6 is missing."""
    try:
        return socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        pytest.skip(f"no IPv6 here: {error}")


def front_ends(server: Server, num: int = 2) -> dict[int, requests.Session]:
    """An open connection, which stays with one process, to each of `num` front ends, by process id."""
    found: dict[int, requests.Session] = {}

    def has_all() -> bool:
        session = requests.Session()
        pid = session.get(server.url + "/live", timeout=10).json()["pid"]
        found.setdefault(pid, session)
        return len(found) >= num

    wait_until(has_all, 20, lambda: f"only {list(found)} answer")
    return found


def phases(server: Server) -> list[str]:
    return [one["phase"] for one in server.get("/ready").json()["workers"]]


def worker_pids(server: Server) -> list[int]:
    """Worker processes by index."""
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "--worker-id" in words and words[1:3] == ["-m", "workers"]:
            found[int(words[words.index("--worker-id") + 1])] = process.pid
    return [found[index] for index in sorted(found)]
