"""Fixtures: a tiny model, real servers with real vLLM, and servers with stub workers."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from harness.fork_server import Forked, ForkServer, fork_server
from harness.servers import (
    KV_CACHE,
    REPOSITORY,
    Server,
    environment,
    fork_server_process,
    forked_server,
    kill_all,
    need_gpus,
    running_server,
    serve_process,
)
from tests.clients.published import AGAINST_VLLM
from titopool.settings.gpus import visible_gpus

# Threads of OpenMP that spin cost many times the work where other processes use the cores, too. libgomp
# reads it as torch is imported; workers set it themselves.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
HERE = Path(__file__).resolve().parent
ALL = HERE / "all"
# Fixtures whose servers tests of several modules share; the longest first.
SHARED_SERVERS = ("weights_server", "server", "single_server")
# What starts servers or engines: fixtures, and functions that a module imports.
STARTING_FIXTURES = {
    "start_server", "start_forked", "stub_server", "start_stub", "start_stub_at", "in_child",
}  # fmt: skip
STARTING_FUNCTIONS = {"running_server", "serve_process", "environment", "engine_in_process"}
ENGINE_OPTIONS = (
    *KV_CACHE, "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "128",
)  # fmt: skip
if visible_gpus():
    # Two servers of the tests may share a GPU.
    ENGINE_OPTIONS += ("--gpu-memory-utilization", "0.3")

# A machine of CI stands still now and then.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves tests/all out unless an argument names a part of it."""
    named = (Path(one.partition("::")[0]).resolve() for one in config.args)
    return (
        True
        if collection_path == ALL and not any(one.is_relative_to(ALL) for one in named)
        else None
    )


def group_of(item: pytest.Function) -> str:
    """Tests of one group run in one process and share servers: a fixture's, those of a folder that has
    a conftest.py, or a module's."""
    fixtures = item._fixtureinfo.name2fixturedefs
    for name in SHARED_SERVERS:
        if name in fixtures and fixtures[name][-1].scope == "session":
            return name
    folder = item.path.parent
    if folder != HERE and (folder / "conftest.py").exists():
        return folder.relative_to(HERE).as_posix()
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Groups tests for pytest-xdist's `--dist loadgroup`, and marks those that start a server."""
    for item in items:
        group = group_of(item)
        item.add_marker(pytest.mark.xdist_group(group))
        is_shared = not group.endswith(".py")
        starts = STARTING_FIXTURES & set(item.fixturenames)
        if is_shared or starts or STARTING_FUNCTIONS & set(vars(item.module)):
            item.add_marker(pytest.mark.server)
    # Groups that start servers come first: the short ones even out when the processes end.
    first = {group_of(item) for item in items if item.get_closest_marker("server")}
    items.sort(key=lambda item: group_of(item) not in first)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """Stops a group's shared servers after its last test: an idle engine costs a tenth of a core."""
    group = group_of(item)
    if group in SHARED_SERVERS and nextitem is not None and group_of(nextitem) != group:
        item._fixtureinfo.name2fixturedefs[group][-1].finish(item._request)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def weights_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which servers may load weights."""
    return tmp_path_factory.mktemp("weights-root")


def make_below(root: Path, name: str, seed: int) -> str:
    from titopool.demo_model import make_model

    folder = root / name
    folder.mkdir()
    make_model(folder, seed=seed)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_model(weights_root: Path) -> str:
    """Folder of a tiny random Qwen3 with its tokenizer."""
    return make_below(weights_root, "tiny-qwen3", 0)


@pytest.fixture(scope="session")
def other_model(weights_root: Path) -> str:
    """The same architecture with other weights."""
    return make_below(weights_root, "other-qwen3", 1)


@pytest.fixture(scope="session")
def own(tiny_model: str) -> list[tuple[str, Any]]:
    """The tensors of `tiny_model` by name, as a trainer sends them."""
    from tests.kit.trainers.trainer import tensors_of

    return tensors_of(tiny_model)


@pytest.fixture(scope="session")
def other(other_model: str) -> list[tuple[str, Any]]:
    """The tensors of `other_model`."""
    from tests.kit.trainers.trainer import tensors_of

    return tensors_of(other_model)


@pytest.fixture(scope="session")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two vLLM workers behind two gunicorn processes."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--num-workers", "2", "--num-front-ends", "2", *ENGINE_OPTIONS)
    with running_server(tiny_model, *options, log=log, num_workers=2) as running:
        yield running


@pytest.fixture(scope="session")
def weights_server(
    tiny_model: str, weights_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The same for tests that change weights, kill workers and let updates time out."""
    need_gpus(3)
    log = tmp_path_factory.mktemp("weights-server") / "log"
    options = (
        "--num-workers", "2", "--num-front-ends", "2", *ENGINE_OPTIONS, "--max-model-len", "1024",
    )  # fmt: skip
    updates = ("--weights-root", str(weights_root), "--weight-update-timeout-s", "15")
    with running_server(tiny_model, *options, *updates, log=log, num_workers=2) as running:
        yield running


@pytest.fixture(scope="session")
def single_server(
    tiny_model: str, weights_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One vLLM worker behind two gunicorn processes, reachable over IPv6 where there is IPv6.

    It finds tool calls, and tests may change its weights, which wait in the KV cache's memory.
    """
    log = tmp_path_factory.mktemp("single-server") / "log"
    options = (
        *ENGINE_OPTIONS, "--max-model-len", "1024", "--num-workers", "1", "--num-front-ends", "2",
        "--tool-call-parser", "hermes", "--weights-root", str(weights_root),
        "--weight-update-timeout-s", "15", "--weight-staging", "kv",
        "--host", "::" if socket.has_dualstack_ipv6() else "127.0.0.1", "--grammar-timeout-s", "2",
    )  # fmt: skip
    with running_server(tiny_model, *options, log=log) as running:
        yield running


@pytest.fixture
def port() -> Iterator[int]:
    """A trainer's port with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


StartStub = Callable[..., Forked]
StartServer = Callable[..., Server]


@pytest.fixture
def stub_forks() -> ForkServer:
    """What forks stub workers; a module whose stubs need torch has another."""
    return fork_server


@pytest.fixture
def start_stub_at(stub_forks: ForkServer) -> Iterator[StartStub]:
    """Starts stub workers: `start_stub_at("tcp://…", "--delay-s", "1")`."""
    started: list[Forked] = []

    def start(endpoint: str, *arguments: str, cwd: Path = REPOSITORY, **variables: str) -> Forked:
        variables["PYTHONPATH"] = str(REPOSITORY)
        process = stub_forks.start(
            "harness.stub_worker", ["--endpoint", endpoint, *arguments],
            environ=environment(**variables), folder=cwd,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill_group()


@pytest.fixture
def start_stub(tmp_path: Path, start_stub_at: StartStub) -> StartStub:
    """Starts stub workers: `start_stub(index, "--delay-s", "1")` at `ipc://…/worker-<index>`."""

    def start(index: int, *arguments: str, **variables: Any) -> Forked:
        Path(f"{tmp_path}/worker-{index}").unlink(missing_ok=True)
        endpoint = f"ipc://{tmp_path}/worker-{index}"
        return start_stub_at(endpoint, "--worker-id", str(index), *arguments, **variables)

    return start


@pytest.fixture
def stub_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`stub_server(num_workers, …)`: gunicorn before workers that `start_stub` starts; with 0
    workers `--endpoints` is among the arguments."""
    with ExitStack() as stack:

        def start(
            num_workers: int, *arguments: str, num_ready: int | None = None, **variables: str
        ) -> Server:
            endpoints = ",".join(f"ipc://{tmp_path}/worker-{index}" for index in range(num_workers))
            local = ("--endpoints", endpoints) if num_workers else ()
            return stack.enter_context(
                forked_server(
                    *local, *arguments, log=tmp_path / "server-log",
                    num_workers=num_workers if num_ready is None else num_ready, **variables,
                )
            )  # fmt: skip

        yield start


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that the test ends itself; kills what is left of them."""
    yield from _starting(serve_process, tmp_path)


@pytest.fixture
def start_forked(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """As `start_server`, where the start itself is not tested: forks, as are their stub workers."""
    yield from _starting(fork_server_process, tmp_path)


def _starting(start_process: Callable[..., Any], folder: Path) -> Iterator[Callable[..., Server]]:
    started: list[subprocess.Popen[bytes] | Forked] = []

    def start(*arguments: str, **options: Any) -> Server:
        log = folder / f"server-log-{len(started)}"
        process, url = start_process(*arguments, log=log, **options)
        started.append(process)
        return Server(process, url, log)

    yield start
    for process in started:
        if process.poll() is None:
            kill_all(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            process.wait()


if AGAINST_VLLM:
    from tests.kit.peers.vllm_instead import server, single_server  # noqa: F401
