"""`python -m workers` without a supervisor: real vLLM, over TCP with a key."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.servers import (
    REPOSITORY,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    environment,
    free_port,
    kill_all,
    need_gpus,
    running_server,
    wait_until,
    wait_until_ended,
)
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models.weights import assert_serves, weights_client
from tests.kit.trainers.trainer import tensors_of
from tests.kit.trainers.trl_weights_client import update_by_trl
from workers.__main__ import default_worker_id

StartWorker = Callable[..., subprocess.Popen[bytes]]
# `python -m workers` for each of the endpoints in sys.argv[1]. Its import of vLLM is most of its start, so
# the workers are forks of one process that has imported it. One with GPUs chooses its own before.
SEVERAL = """
import os, sys
from titopool.settings.gpus import visible_gpus
from workers import __main__ as worker

if not visible_gpus():
    from harness.forked_modules import import_engine
    import_engine()
endpoints, *words = sys.argv[1:]
for endpoint in endpoints.split(","):
    if not os.fork():
        os.setsid()
        sys.argv = [worker.__file__, "--endpoint", endpoint, *words]
        worker.run()
sys.exit(any([os.wait()[1] for _ in endpoints.split(",")]))
"""


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return str(tmp_path / "curve.key")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker-log"


@pytest.fixture
def start_worker(tiny_model: str, key_file: str, log: Path) -> Iterator[StartWorker]:
    """Starts a worker at an endpoint, or a parent of several; kills what is left of them afterwards."""
    started = []

    def start(*endpoints: str) -> subprocess.Popen[bytes]:
        words = ["-m", "workers", "--endpoint"] if len(endpoints) == 1 else ["-c", SEVERAL]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *words, ",".join(endpoints), tiny_model, *ENGINE_OPTIONS],
                env=environment(TITOPOOL_CURVE_KEY_FILE=key_file),
                cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            kill_all(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            process.wait()


def test_standalone_workers_serve_front_ends_with_their_key(
    start_worker: StartWorker,
    tiny_model: str,
    other_model: str,
    key_file: str,
    log: Path,
    tmp_path: Path,
):
    """Each worker has its own address; the others reach TRL's rank 0 at the first worker's."""
    need_gpus(3)
    endpoints = [f"tcp://127.0.0.{host}:{free_port()}" for host in (2, 3)]
    parent = start_worker(*endpoints)
    with running_server(
        "--endpoints", ",".join(endpoints), log=tmp_path / "server-log", num_workers=2,
        TITOPOOL_CURVE_KEY_FILE=key_file,
    ) as server:  # fmt: skip
        assert server.generate([[1, 2, 3]], max_tokens=2)["prompt_ids"] == [[1, 2, 3]]
        with running_server(
            "--endpoints", endpoints[0], log=tmp_path / "stranger-log", num_workers=0,
            TITOPOOL_CURVE_KEY_FILE=str(tmp_path / "another.key"),
        ) as stranger:  # fmt: skip
            # Longer than a heartbeat interval: the worker is connected and ready.
            wait_until(lambda: stranger.get("/ready").json()["workers"], 10)
            assert stranger.get("/health").status_code == 503
            assert stranger.get("/ready").json()["workers"][0]["phase"] == "unreachable"
        client = weights_client(server, timeout_s=30)
        client.update(tensors_of(other_model), policy="keep")
        client.close()
        assert_serves(server, other_model, times=4)
        update_by_trl(server.url, tiny_model)
        assert_serves(server, tiny_model, times=4)
        for worker in psutil.Process(parent.pid).children():
            children = worker.children(recursive=True)
            worker.send_signal(signal.SIGTERM)
            worker.wait(STOP_TIMEOUT_S)
            wait_until_ended(children)
        assert parent.wait(STOP_TIMEOUT_S) == 0
    assert "Traceback" not in log.read_text()


# `test_the_server_ends_with_its_supervisor` has workers that end while they start.
@pytest.mark.variant
def test_a_worker_stopped_while_loading_leaves_no_process(start_worker, log):
    worker = start_worker(f"tcp://127.0.0.1:{free_port()}")
    own = psutil.Process(worker.pid)
    # vLLM's engine process has started, but does not watch the worker yet.
    wait_until(
        lambda: "loading" in log.read_text() and own.children(recursive=True), START_TIMEOUT_S
    )
    children = own.children(recursive=True)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(STOP_TIMEOUT_S) == 0
    wait_until_ended(children)


def test_workers_of_one_host_have_different_names(start_worker, log):
    addresses = [f"0.0.0.0:{free_port()}", f"127.0.0.2:{free_port()}"]
    for address in addresses:
        start_worker(f"tcp://{address}")
    host = os.uname().nodename
    for name in (addresses[0].removeprefix("0.0.0.0:"), addresses[1].replace(":", "-")):
        wait_until(
            lambda name=name: f"worker {host}-{name}: importing" in log.read_text(), START_TIMEOUT_S
        )


@pytest.mark.parametrize(
    "endpoint, name",
    [
        ("tcp://0.0.0.0:5555", "5555"),
        ("tcp://[::]:5555", "5555"),
        ("tcp://*:5555", "5555"),
        ("tcp://10.0.0.7:5555", "10.0.0.7-5555"),
        ("ipc:///run/a/worker-0", "run-a-worker-0"),
        ("ipc:///run/b/worker-0", "run-b-worker-0"),
    ],
)
def test_a_worker_is_named_after_host_and_endpoint(endpoint: str, name: str):
    assert default_worker_id(endpoint) == f"{os.uname().nodename}-{name}"


@pytest.mark.parametrize(
    "arguments, parts",
    [
        pytest.param([], ["--endpoint is missing", "--worker-id"], id="no-endpoint"),
        pytest.param(["--endpoint"], ["--endpoint", "value"], id="no-value"),
        pytest.param(
            ["--endpoint=ipc:///x", "--worker-id", "a/b"], ["--worker-id", "'a/b'"], id="no-name"
        ),
    ],
)
def test_a_worker_that_cannot_start_prints_the_cause_at_once(
    arguments: list[str], parts: list[str]
):
    result = subprocess.run(
        [sys.executable, "-m", "workers", *arguments],
        env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr
