"""A pool on a Ray cluster: Ray's own test cluster of three nodes, stub engines, real front ends."""

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from harness.servers import REPOSITORY, Server, alive, environment, kill_all, wait_until
from tests.kit.peers.load import Load, has_phases

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'titopool[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

STUB = f"{sys.executable} -m harness.stub_worker"
# The store of objects, in shared memory, is for nothing here.
STORE_BYTES = 80 * 2**20


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three nodes with two cores each; the first one is the head."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    made = Cluster()
    try:
        add_node(made, include_dashboard=False)
        for _ in range(2):
            add_node(made)
        yield made
    finally:
        made.shutdown()


def add_node(cluster: Cluster, **options: Any) -> None:
    """Ray gives a node 30 s to start, and leaves the processes of one that takes longer."""
    others = psutil.Process().children()
    for attempt in range(3):
        try:
            cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES, **options)
            return
        except Exception:
            kill_all([one for one in psutil.Process().children() if one not in others])
            if attempt == 2:
                raise


def start(start_server, cluster: Cluster, *options: str) -> Server:
    server = start_server("--cluster", "ray", *options, RAY_ADDRESS=cluster.address)
    return server


def num_ready(server: Server) -> int:
    return int(server.get("/ready").json()["num_ready"])


def node_with_a_worker(cluster: Cluster) -> Any:
    """A node other than the head that runs a worker of the pool."""
    for node in cluster.worker_nodes:
        if has_a_worker(node):
            return node
    raise AssertionError("expected a worker on a node other than the head, got none")


def has_a_worker(node: Any) -> bool:
    (raylet,) = node.all_processes["raylet"]
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(raylet.process.pid).children(recursive=True)
        return any("harness.stub_worker" in one.cmdline() for one in below)
    return False


def test_a_pool_grows_shrinks_survives_a_node_and_takes_an_update(
    cluster: Cluster, start_server, tmp_path: Path
):
    server = start(
        start_server, cluster, "--worker-command", f"{STUB} --delay-s 0.05 --runs-file {tmp_path}/runs",
        "--num-workers", "2", "--num-front-ends", "2", "--weights-root", str(tmp_path),
    )  # fmt: skip
    server.wait_until_ready(2)
    with Load(server) as load:
        assert server.post("/workers/scale", {"num_workers": 4}).status_code == 202
        wait_until(lambda: has_phases(server, *["ready"] * 4), 40, lambda: server.log)
        cluster.remove_node(node_with_a_worker(cluster), allow_graceful=False)
        wait_until(lambda: num_ready(server) < 4, 20)
        add_node(cluster)
        wait_until(lambda: has_phases(server, *["ready"] * 4), 60, lambda: server.log)
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "weights").write_text("1")
        body = {"path": str(tmp_path / "one"), "policy": "keep"}
        answer = server.post("/update_weights", body)
        assert answer.json().get("version") == 1, answer.text
        versions = {one["weight_version"] for one in server.get("/ready").json()["workers"]}
        assert versions == {1}
        server.post("/workers/scale", {"num_workers": 1})
        wait_until(lambda: has_phases(server, "ready"), 40, lambda: server.log)
    assert load.failed == []
    assert load.num_answered > 100
    # Only what the killed node had: at most a request of each client.
    assert load.num_repeated(tmp_path / "runs") <= 8


def test_a_worker_that_hangs_is_ended_and_started_again(cluster: Cluster, start_server):
    """By the supervisor in its actor."""
    server = start(
        start_server, cluster, "--worker-command", STUB, "--num-workers", "2",
        "--heartbeat-timeout-s", "2", "--worker-hang-timeout-s", "3",
    )  # fmt: skip
    server.wait_until_ready(2)
    (raylet,) = node_with_a_worker(cluster).all_processes["raylet"]
    below = psutil.Process(raylet.process.pid).children(recursive=True)
    hung = next(one for one in below if "harness.stub_worker" in one.cmdline())
    hung.suspend()
    wait_until(lambda: not alive([hung]), 20, lambda: server.log)
    wait_until(lambda: has_phases(server, "ready", "ready"), 40, lambda: server.log)
    assert "no sign of life for 3 s (worker_hang_timeout_s)" in server.log


def test_a_worker_leaves_a_node_that_ray_drains_and_loses_no_request(
    cluster: Cluster, start_server, tmp_path: Path
):
    server = start(
        start_server, cluster, "--worker-command", f"{STUB} --delay-s 0.05 --runs-file {tmp_path}/runs",
        "--num-workers", "4", "--num-front-ends", "2",
    )  # fmt: skip
    server.wait_until_ready(4)
    add_node(cluster)
    endpoints = lambda: {one["endpoint"] for one in server.get("/ready").json()["workers"]}  # noqa: E731
    before, node = endpoints(), node_with_a_worker(cluster)
    with Load(server) as load:
        drain(cluster, node.node_id)
        wait_until(lambda: "Ray drains its node" in server.log, 10)
        wait_until(
            lambda: has_phases(server, *["ready"] * 4) and endpoints() != before,
            60,
            lambda: server.log,
        )
    assert not has_a_worker(node)
    assert load.failed == []
    assert load.num_answered > 20
    assert load.num_repeated(tmp_path / "runs") == 0


def drain(cluster: Cluster, node_id: str) -> None:
    """As an autoscaler does before it takes a node away."""
    words = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "drain-node",
        "--address",
        cluster.address,
    ]
    options = {
        "node-id": node_id, "reason": "DRAIN_NODE_REASON_PREEMPTION", "reason-message": "a test",
        "deadline-remaining-seconds": "300",
    }  # fmt: skip
    for name, value in options.items():
        words += [f"--{name}", value]
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def test_a_trainer_s_own_program_deploys_waits_scales_and_stops(cluster: Cluster):
    script = """
import ray, requests, sys
from titopool.cluster import RayServer

ray.init(address=sys.argv[1], log_to_driver=False)
options = ["--worker-command", sys.argv[2], "--worker-port", sys.argv[3]]
with RayServer(num_workers=1, options=options, environment={"TITOPOOL_API_KEY": "k"}) as server:
    client = server.wait(180)
    assert client.generate([[1, 2]], max_tokens=2)[0].completions[0].ids.tolist() == [2, 1]
    server.scale(2)
    assert len(server.wait(180, num_workers=2).wait_until_ready()) == 2
    answer = requests.get(server.url + "/ready", headers={"Authorization": "Bearer k"}, timeout=10)
    found = [one["endpoint"] for one in answer.json()["workers"]]
    print("ports", *sorted(one.rpartition(":")[2] for one in found))
    print("url", server.url, flush=True)
print("stopped", flush=True)
"""
    port = two_free_ports()
    words = [sys.executable, "-c", script, cluster.address, STUB, str(port)]
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=600, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "stopped"
    assert f"ports {port} {port + 1}\n" in done.stdout
    (url,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("url"))
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/live", timeout=5)
    words = ["--port", url.rpartition(":")[2]]
    left = [one for one in psutil.process_iter(["cmdline"]) if has_words(one, words)]
    assert alive(left) == []


def two_free_ports() -> int:
    """The first of two neighbouring ports that were free a moment ago, below those that Linux chooses."""
    while True:
        first = random.randrange(20_000, 30_000)
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("0.0.0.0", first))
            other.bind(("0.0.0.0", first + 1))
            return first


def has_words(process: psutil.Process, words: list[str]) -> bool:
    """Whether `words` are neighbours in the process's command."""
    command = process.info["cmdline"] or []
    return any(command[place : place + len(words)] == words for place in range(len(command)))
