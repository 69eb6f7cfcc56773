"""Commits during which a process dies: afterwards all ready workers have the same weights."""

import ast
import asyncio
import dataclasses
import importlib.util
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from harness.servers import Server, wait_until
from harness.stub_worker import stub_adapters
from tests.conftest import StartServer, StartStub
from titopool.errors import Conflict, InvalidRequest

QUICK = {
    "TITOPOOL_HEARTBEAT_INTERVAL_S": "0.1",
    "TITOPOOL_HEARTBEAT_TIMEOUT_S": "2",
    "TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S": "20",
}


class Cluster:
    """Stub workers with folders of weights and adapters, behind two front ends."""

    def __init__(self, root: Path, start_stub: StartStub, stub_server: StartServer):
        self.root = root / "root"
        self._start_stub, self._stub_server = start_stub, stub_server
        for name in ("one", "two"):
            (self.root / name).mkdir(parents=True)
            (self.root / name / "weights.safetensors").write_text(name)
            (self.root / name / "adapter_config.json").write_text('{"r": 8}')
            (self.root / name / "adapter_model.safetensors").write_text(name)
        self.processes: dict[int, Any] = {}

    def start(self, index: int, *arguments: str, **options: Any) -> None:
        self.processes[index] = self._start_stub(
            index, *arguments, **options, TITOPOOL_WEIGHTS_ROOT=str(self.root), **QUICK
        )

    def serve(self, num_workers: int = 3) -> Server:
        self.server = self._stub_server(num_workers, "--num-front-ends", "2", **QUICK)
        return self.server

    def update(self, folder: str = "one", **fields: Any) -> Any:
        body = {"path": str(self.root / folder), "policy": "keep", **fields}
        return self.server.post("/update_weights", body)

    def phases(self) -> list[str]:
        return [one["phase"] for one in self.ready()]

    def versions(self) -> list[int]:
        return [one["weight_version"] for one in self.ready() if one["phase"] == "ready"]

    def ready(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.server.get("/ready").json()["workers"]
        return sorted(workers, key=lambda one: str(one["endpoint"]))

    def wait_for(self, *phases: str) -> None:
        # Ask often enough to reach both front ends, which may have different heartbeats.
        agree = lambda: all(self.phases() == list(phases) for _ in range(8))  # noqa: E731
        wait_until(agree, 15, lambda: f"{self.ready()} {self.server.log}")

    def check_generates(self) -> None:
        """All ready workers generate, with one version of the weights."""
        num_ready = self.phases().count("ready")
        answer = self.server.generate([[index, 7] for index in range(1, 10 * num_ready)])
        assert answer["completion_ids"] == [[7, index] for index in range(1, 10 * num_ready)]
        assert len(set(self.versions())) == 1, (self.ready(), self.server.log)
        assert self.server.get("/is_paused").json()["is_paused"] is False


@pytest.fixture
def cluster(tmp_path: Path, start_stub: StartStub, stub_server: StartServer) -> Cluster:
    return Cluster(tmp_path, start_stub, stub_server)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_worker_that_dies_in_apply_does_not_keep_the_others_from_the_new_weights(
    cluster: Cluster, victim: int
):
    for index in range(3):
        cluster.start(index, *(["--die-at", "apply"] if index == victim else []))
    cluster.serve()
    begin = time.monotonic()
    answer = cluster.update().json()
    assert time.monotonic() - begin < 30
    assert answer["version"] == 1
    assert [one["endpoint"][-1] for one in answer["lost"]] == [str(victim)]
    phases = ["ready"] * 3
    phases[victim] = "unreachable"
    cluster.wait_for(*phases)
    assert cluster.versions() == [1, 1]
    cluster.check_generates()
    # The worker restarts without a ledger, learns the pool's weights and loads their folder.
    cluster.start(victim)
    cluster.wait_for("ready", "ready", "ready")
    assert cluster.versions() == [1, 1, 1]
    cluster.check_generates()


def test_a_worker_that_dies_before_apply_leaves_the_old_weights_everywhere(cluster: Cluster):
    for index in range(3):
        cluster.start(index, *(["--die-at", "check_folder"] if index == 1 else []))
    cluster.serve()
    assert cluster.update().status_code == 409
    cluster.wait_for("ready", "unreachable", "ready")
    assert cluster.versions() == [0, 0]
    cluster.check_generates()


def test_workers_resume_when_the_front_end_that_leads_a_commit_dies(cluster: Cluster):
    # The last worker prepares slowly, so the others wait in state prepared.
    for index in range(3):
        cluster.start(index, *(["--slow", "clear_caches=6"] if index == 2 else []))
    server = cluster.serve()
    front_ends = psutil.Process(server.process.pid).children()
    thread = threading.Thread(target=lambda: ignore_os_error(cluster.update))
    thread.start()
    states = lambda: [one["state"] for one in server.get("/weights").json()["workers"]]  # noqa: E731
    wait_until(lambda: states() == ["prepared", "prepared", "preparing"], 5)
    for one in front_ends:
        # One of the two leads the commit; gunicorn replaces both.
        one.send_signal(signal.SIGKILL)
    thread.join(20)
    wait_until(lambda: is_live(server) and states() == ["closed"] * 3, 15)
    cluster.wait_for("ready", "ready", "ready")
    assert cluster.versions() == [0, 0, 0]
    cluster.check_generates()
    assert cluster.update().json()["version"] == 1


def is_live(server: Server) -> bool:
    try:
        return server.get("/live").ok
    except OSError:
        return False


def ignore_os_error(call: Callable[[], Any]) -> None:
    try:
        call()
    except OSError:
        return


def test_a_worker_that_is_stopped_before_apply_catches_up_once_it_continues(
    cluster: Cluster,
):
    for index in range(3):
        cluster.start(index, *(["--slow", "clear_caches=2"] if index == 0 else []))
    server = cluster.serve()
    responses: list[Any] = []
    thread = threading.Thread(target=lambda: responses.append(cluster.update().json()))
    thread.start()
    state = lambda: server.get("/weights").json()["workers"][2]["state"]  # noqa: E731
    wait_until(lambda: state() == "prepared", 5)
    cluster.processes[2].send_signal(signal.SIGSTOP)
    thread.join(20)
    (answer,) = responses
    assert answer["version"] == 1
    assert [one["endpoint"][-1] for one in answer["lost"]] == ["2"]
    cluster.check_generates()
    cluster.processes[2].send_signal(signal.SIGCONT)
    cluster.wait_for("ready", "ready", "ready")
    assert cluster.versions() == [1, 1, 1]


def test_cleanup_calls_do_not_wait_for_a_lost_worker(cluster: Cluster):
    for index in range(3):
        cluster.start(index)
    server = cluster.serve()
    assert server.post("/pause", {"mode": "keep", "lease_s": 60}).ok
    cluster.processes[1].kill()
    cluster.wait_for("ready", "unreachable", "ready")
    states = [one["state"] for one in server.get("/weights").json()["workers"]]
    assert states == ["closed", "unreachable", "closed"]
    assert server.get("/is_paused").json()["is_paused"] is True
    # The restarted worker joins a paused pool, so it is paused too.
    cluster.start(1)
    cluster.wait_for("ready", "ready", "ready")
    leases = lambda: [one["lease_left_s"] for one in server.get("/weights").json()["workers"]]  # noqa: E731
    wait_until(lambda: all(leases()), 5)
    cluster.processes[0].kill()
    cluster.wait_for("unreachable", "ready", "ready")
    assert server.post("/resume", {}).json()["was_paused"] is True
    assert server.post("/weights/abort", {"update": "none"}).status_code == 409
    assert server.post("/weights/close", {"session": "none"}).status_code == 409
    assert server.get("/is_paused").json() == {"is_paused": False, "lease_left_s": None}
    cluster.check_generates()


def test_requests_get_503_while_every_worker_has_lost_the_weights(cluster: Cluster):
    for index in range(2):
        cluster.start(index)
    server = cluster.serve(2)
    assert server.post("/weights/accept", {}).status_code == 409
    assert cluster.update().json()["version"] == 1
    for index in range(2):
        cluster.processes[index].kill()
        (cluster.root / "one" / "weights.safetensors").write_text("changed since")
        cluster.start(index)
    cluster.wait_for("waiting_for_weights", "waiting_for_weights")
    for _ in range(4):
        # From either front end.
        answer = server.post("/generate/", {"prompts": [[1]]})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "weights_lost"
    assert server.post("/weights/accept", {}).json() == {"weight_version": 0, "restarting": []}
    cluster.wait_for("ready", "ready")
    assert cluster.versions() == [0, 0]
    cluster.check_generates()
    # A worker that starts now accepts them too, and updates work.
    cluster.processes[0].kill()
    cluster.start(0)
    cluster.wait_for("ready", "ready")
    assert cluster.update("two").json()["version"] == 1
    cluster.check_generates()


def test_accept_is_refused_while_a_worker_has_the_weights(cluster: Cluster):
    for index in range(2):
        cluster.start(index)
    server = cluster.serve(2)
    assert cluster.update().json()["version"] == 1
    cluster.processes[1].kill()
    (cluster.root / "one" / "weights.safetensors").write_text("changed since")
    cluster.start(1)
    cluster.wait_for("ready", "waiting_for_weights")
    refusal = server.post("/weights/accept", {})
    assert refusal.status_code == 409
    assert "serves version 1" in refusal.json()["error"]["message"]
    cluster.wait_for("ready", "waiting_for_weights")
    assert cluster.versions() == [1]
    cluster.check_generates()


def test_a_pause_reaches_a_worker_once_it_has_loaded(cluster: Cluster):
    cluster.start(0)
    cluster.start(1)
    server = cluster.serve(2)
    cluster.processes[1].kill()
    loaded = cluster.root / "loaded"
    cluster.start(1, "--load-until", str(loaded))
    cluster.wait_for("ready", "loading")
    answer = server.post("/pause", {"mode": "keep", "lease_s": 60})
    assert answer.json() == {"status": "paused", "is_paused": True, "lease_s": 60}
    # The loading worker learns of the pause once it is ready.
    loaded.touch()
    cluster.wait_for("ready", "ready")
    leases = lambda: [one["lease_left_s"] for one in server.get("/weights").json()["workers"]]  # noqa: E731
    wait_until(lambda: all(leases()), 5)
    assert server.post("/resume", {}).json()["was_paused"] is True
    wait_until(lambda: not any(leases()), 5)
    cluster.check_generates()


def test_workers_do_not_serve_different_files_of_one_folder(cluster: Cluster):
    for index, name in enumerate(("one", "two")):
        (cluster.root / name / "model.safetensors").write_text(name * (1 + index))
        cluster.start(index, cwd=cluster.root / name)
    server = cluster.serve(2)
    # Each worker's own folder, as if two hosts had different disks at this path.
    answers = [
        cluster.update("/proc/self/cwd"),
        server.post("/v1/load_lora_adapter", {"lora_name": "style", "lora_path": "/proc/self/cwd"}),
    ]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        assert "workers see different folders" in answer.json()["error"]["message"]
    assert cluster.versions() == [0, 0]
    assert [one["adapters"] for one in server.get("/weights").json()["workers"]] == [{}, {}]
    assert cluster.update().json()["version"] == 1
    cluster.check_generates()


# ---- adapters ----------------------------------------------------------------------------


CLIENTS = Path(sys.executable).parents[1] / "clients"
OPTIONS = {
    "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 64}, "lora_bias": True,
    "init_lora_weights": "pissa_niter_16", "alora_invocation_tokens": [1],
    "layer_replication": [[0, 1]], "use_bdlora": {"nblocks": 2}, "use_qalora": True,
}  # fmt: skip
PLAIN = {
    "rank_pattern": {}, "alpha_pattern": None, "lora_bias": False, "init_lora_weights": "Gaussian",
}  # fmt: skip


def peft_helper(folder: Path) -> Any:
    """vLLM's class of an adapter's options: its fields, without importing vLLM."""
    (found,) = [
        one
        for one in ast.parse((folder / "vllm/lora/peft_helper.py").read_text()).body
        if isinstance(one, ast.ClassDef)
    ]
    names = [one.target.id for one in found.body if isinstance(one, ast.AnnAssign)]
    return SimpleNamespace(PEFTHelper=dataclasses.make_dataclass("PEFTHelper", names))


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_an_adapter_that_vllm_ignores_are_refused(
    cluster: Cluster, option: str, monkeypatch: pytest.MonkeyPatch
):
    folder = cluster.root / "one"
    config = {"r": 8, "init_lora_weights": True} | PLAIN | {option: OPTIONS[option]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    installed = Path(importlib.util.find_spec("vllm").origin).parents[1]
    for version, is_read in ((CLIENTS / "vllm-0.31.0", False), (installed, True)):
        monkeypatch.setitem(sys.modules, "vllm.lora.peft_helper", peft_helper(version))
        adapters = stub_adapters()
        if is_read:
            asyncio.run(adapters.load("style", 1, str(folder)))
        else:
            with pytest.raises(InvalidRequest, match=f"got {option} in adapter_config.json"):
                asyncio.run(adapters.load("style", 1, str(folder)))
        assert adapters.is_loaded("style", 1) is is_read


def test_an_adapter_whose_files_change_while_it_is_loaded_does_not_serve(cluster: Cluster):
    adapters, folder = stub_adapters(), cluster.root / "one"

    async def load_while_it_changes() -> None:
        async def add(_: Any) -> None:
            (folder / "adapter_model.safetensors").write_text("of step 2")

        files = await adapters.load("style", 1, str(folder))
        adapters.switch("style", 1)
        adapters._llm.add_lora = add
        with pytest.raises(Conflict, match="expected the files that were there"):
            await adapters.load("style", 2, str(folder), files)
        await asyncio.sleep(0)
        assert adapters.versions == adapters.latest_versions == {"style": 1}
        assert not adapters._retired

    asyncio.run(load_while_it_changes())


def test_a_worker_restarted_without_a_ledger_loads_the_adapters_of_the_pool(
    cluster: Cluster,
):
    for index in range(3):
        cluster.start(index)
    server = cluster.serve()
    load = {"lora_name": "style", "lora_path": str(cluster.root / "one")}
    assert server.post("/v1/load_lora_adapter", load).json()["version"] == 1
    cluster.processes[1].kill()
    cluster.wait_for("ready", "unreachable", "ready")
    # The adapter stays available at the workers that have it.
    body = {"prompts": [[1, 2]] * 9, "lora_name": "style"}
    for _ in range(8):
        assert server.post("/generate/", body).json()["lora_versions"] == [1] * 9
    cluster.start(1)
    cluster.wait_for("ready", "ready", "ready")
    adapters = lambda: [one.get("adapters") for one in server.get("/weights").json()["workers"]]  # noqa: E731
    wait_until(lambda: adapters() == [{"style": 1}] * 3, 5)
    # While one worker is stopped, a load fails and an unload succeeds.
    cluster.processes[2].send_signal(signal.SIGSTOP)
    cluster.wait_for("ready", "ready", "unreachable")
    assert server.post("/v1/load_lora_adapter", load).status_code == 503
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "style"}).json()["version"] == 1
    cluster.processes[2].send_signal(signal.SIGCONT)
    cluster.wait_for("ready", "ready", "ready")
    wait_until(lambda: adapters() == [{}] * 3, 5)
    assert server.post("/generate/", body).status_code == 404
    assert server.post("/v1/load_lora_adapter", load).json()["version"] == 2


def test_an_adapter_version_is_not_used_twice_after_a_restart(cluster: Cluster):
    for index in range(2):
        cluster.start(index)
    server = cluster.serve(2)
    load = {"lora_name": "style", "lora_path": str(cluster.root / "one")}
    assert server.post("/v1/load_lora_adapter", load).json()["version"] == 1
    cluster.processes[0].kill()
    cluster.wait_for("unreachable", "ready")
    cluster.start(0)
    # Whichever version the restarted worker has, the next version is new to every worker.
    cluster.wait_for("ready", "ready")
    assert server.post("/v1/load_lora_adapter", load).json()["version"] == 2
    body = {"prompts": [[1, 2]] * 9, "lora_name": "style"}
    assert server.post("/generate/", body).json()["lora_versions"] == [2] * 9
