"""Fixtures: a tiny model, real servers with real vLLM, and servers with stub workers."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.servers import (
    REPOSITORY,
    Server,
    environment,
    kill_all,
    running_server,
    serve_process,
)
from titopool.settings.gpus import visible_gpus

ENGINE_OPTIONS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "128")
if visible_gpus():
    # Two servers of the tests may share a GPU.
    ENGINE_OPTIONS += ("--gpu-memory-utilization", "0.3")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random Qwen3 with its tokenizer."""
    from titopool.demo_model import make_model

    folder = tmp_path_factory.mktemp("tiny-qwen3")
    make_model(folder)
    return str(folder)


@pytest.fixture(scope="session")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two vLLM workers behind two gunicorn processes."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--num-workers", "2", "--num-front-ends", "2", *ENGINE_OPTIONS)
    with running_server(tiny_model, *options, log=log, num_workers=2) as running:
        yield running


@pytest.fixture(scope="session")
def single_server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM worker behind one gunicorn process, which finds tool calls and reads `tiny_model`."""
    log = tmp_path_factory.mktemp("single-server") / "log"
    options = (
        "--num-workers", "1", "--num-front-ends", "1", "--tool-call-parser", "hermes",
        "--weights-root", tiny_model,
    )  # fmt: skip
    with running_server(tiny_model, *options, *ENGINE_OPTIONS, log=log) as running:
        yield running


StartStub = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start_stub_at() -> Iterator[StartStub]:
    """Starts stub workers: `start_stub_at("tcp://…", "--delay-s", "1")`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.stub_worker", "--endpoint", endpoint, *arguments]
        process = subprocess.Popen(command, env=environment(**variables), cwd=REPOSITORY)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_stub(tmp_path: Path, start_stub_at: StartStub) -> StartStub:
    """Starts stub workers: `start_stub(index, "--delay-s", "1")` at `ipc://…/worker-<index>`."""

    def start(index: int, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        Path(f"{tmp_path}/worker-{index}").unlink(missing_ok=True)
        endpoint = f"ipc://{tmp_path}/worker-{index}"
        return start_stub_at(endpoint, "--worker-id", str(index), *arguments, **variables)

    return start


@pytest.fixture
def stub_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`stub_server(num_workers, …)`: gunicorn before workers that `start_stub` starts; with 0
    workers `--endpoints` is among the arguments."""
    stack = []

    def start(
        num_workers: int, *arguments: str, num_ready: int | None = None, **variables: str
    ) -> Server:
        endpoints = ",".join(f"ipc://{tmp_path}/worker-{index}" for index in range(num_workers))
        local = ("--endpoints", endpoints) if num_workers else ()
        context = running_server(
            *local, *arguments, log=tmp_path / "server-log",
            num_workers=num_workers if num_ready is None else num_ready, **variables,
        )  # fmt: skip
        stack.append(context)
        return context.__enter__()

    yield start
    for context in stack:
        context.__exit__(None, None, None)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that the test ends itself; kills what is left of them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **options: Any) -> Server:
        log = tmp_path / f"server-log-{len(started)}"
        process, url = serve_process(*arguments, log=log, **options)
        started.append(process)
        return Server(process, url, log)

    yield start
    for process in started:
        if process.poll() is None:
            kill_all(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            process.wait()
