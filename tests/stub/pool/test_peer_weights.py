"""A worker without the pool's weights takes them from one that serves: real processes and sockets."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.fork_server import ForkServer, engine_fork_server, fork_server
from harness.servers import free_port, wait_until
from tests.conftest import StartServer, StartStub
from tests.kit.trainers.weight_calls import begin, init_body
from titopool.settings.gpus import visible_gpus

QUICK = {"TITOPOOL_HEARTBEAT_INTERVAL_S": "0.2", "TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S": "60"}
# The bytes of 32 MiB go in two answers; a gate stands before the second one.
TENSORS = ("--tensors", "32")


@pytest.fixture
def stub_forks() -> ForkServer:
    """A process that has imported torch, which takes a stub seconds.

    On GPUs a fork must not have imported vLLM (see `running_server`).
    """
    return fork_server if visible_gpus() else engine_fork_server


class Pool:
    """Stub workers with tensors, behind two front ends."""

    def __init__(self, folder: Path, start_stub: StartStub, stub_server: StartServer, group: int):
        """`group` is the port of the trainer's group."""
        self.gate = folder / "gate"
        self._start_stub, self._stub_server, self._group = start_stub, stub_server, group
        self.workers: dict[int, Any] = {}

    def start(self, index: int, *options: str, **settings: str) -> None:
        self.workers[index] = self._start_stub(index, *(options or TENSORS), **QUICK, **settings)

    def start_gated(self, index: int, **settings: str) -> None:
        self.start(index, *TENSORS, "--gate", str(self.gate), **settings)

    def serve(self, num_workers: int, num_ready: int | None = None) -> None:
        self.server = self._stub_server(
            num_workers, "--num-front-ends", "2", num_ready=num_ready, **QUICK
        )

    def start_and_serve(self, num_workers: int) -> None:
        for index in range(num_workers):
            self.start(index)
        self.serve(num_workers)

    def update(self, num_workers: int, session: str = "one") -> None:
        """A complete update of all workers, through a group."""
        server = self.server
        body = init_body(self._group, session, num_workers + 1)
        # All front ends must know all workers.
        wait_until(
            lambda: server.post("/weights/init", body).status_code == 200, 20, lambda: server.log
        )
        update = begin(server, session).json()["update"]
        answer = server.post("/weights/commit", {"update": update, "policy": "keep"})
        assert answer.status_code == 200, answer.text

    def restart(self, index: int, *options: str) -> None:
        """Kills a worker and starts it again: it has its initial weights."""
        self.workers[index].kill()
        self.workers[index].wait()
        self.start(index, *options)

    def phases(self) -> list[str]:
        workers = self.server.get("/ready").json()["workers"]
        return [one["phase"] for one in sorted(workers, key=lambda one: str(one["endpoint"]))]

    def wait_for(self, *phases: str) -> None:
        agree = lambda: all(self.phases() == list(phases) for _ in range(8))  # noqa: E731
        wait_until(agree, 30, lambda: f"{self.status()} {self.server.log}")

    def status(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.server.get("/weights").json()["workers"]
        return sorted(workers, key=lambda one: str(one["worker"]))

    def wait_for_reason(self, index: int, text: str, field: str = "why_behind") -> None:
        wait_until(
            lambda: text in str(self.status()[index].get(field)), 20, lambda: str(self.status())
        )

    def wait_at_gate(self) -> None:
        wait_until(Path(f"{self.gate}.reached").exists, 30, lambda: str(self.status()))

    def digests(self) -> list[str]:
        answers = []

        def have_come() -> bool:
            answers.append(self.server.post("/weight_checker", {"action": "checksum"}))
            return bool(answers[-1].status_code == 200)

        # All front ends must know all workers.
        wait_until(have_come, 20, lambda: answers[-1].text)
        answer = answers[-1]
        return [digest for _, digest in sorted(answer.json()["checksums"].items())]


@pytest.fixture
def pool(tmp_path: Path, start_stub: StartStub, stub_server: StartServer, port: int) -> Pool:
    return Pool(tmp_path, start_stub, stub_server, port)


@pytest.fixture
def background() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Runs a call in a thread that the test's end waits for."""
    threads: list[threading.Thread] = []

    def run(call: Callable[[], Any]) -> None:
        threads.append(threading.Thread(target=call))
        threads[-1].start()

    yield run
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_restarted_workers_take_the_weights_of_one_that_serves(pool: Pool):
    pool.start_and_serve(3)
    before = pool.digests()
    pool.update(3)
    new = pool.digests()
    assert len(set(new)) == 1
    assert new[0] != before[0]
    # Two newcomers at once.
    pool.restart(1)
    pool.restart(2)
    pool.wait_for("ready", "ready", "ready")
    assert pool.digests() == new
    states = pool.status()
    assert [one["weight_version"] for one in states] == [1, 1, 1]
    assert [one["last_staging"] for one in states[1:]] == ["peer", "peer"]
    assert pool.server.generate([[1, 2]] * 9)["completion_ids"] == [[2, 1]] * 9
    metric = 'weight_updates_total{outcome="applied",staging="peer",worker="1"} 1.0'
    assert metric in pool.server.get("/metrics").text


def test_the_giver_generates_while_its_weights_are_read(pool: Pool):
    pool.start_gated(0)
    pool.start(1)
    pool.serve(2)
    pool.update(2)
    pool.restart(1)
    pool.wait_at_gate()
    assert pool.server.generate([[1, 2]] * 50)["completion_ids"] == [[2, 1]] * 50
    pool.wait_for("ready", "fetching_weights")
    pool.gate.touch()
    pool.wait_for("ready", "ready")
    assert len(set(pool.digests())) == 1


def test_weights_are_given_at_the_port_that_a_firewall_lets_through(pool: Pool):
    at = free_port()
    pool.start_gated(0, TITOPOOL_PEER_PORT=str(at))
    pool.start(1)
    pool.serve(2)
    pool.update(2)
    pool.restart(1)
    pool.wait_at_gate()
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert [one.pid for one in listening if one.laddr.port == at] == [pool.workers[0].pid]
    pool.gate.touch()
    pool.wait_for("ready", "ready")


def test_a_giver_that_dies_half_way_leaves_a_worker_that_does_not_serve(pool: Pool):
    pool.start_gated(0)
    pool.start(1)
    pool.serve(2)
    pool.update(2)
    pool.restart(1)
    pool.wait_at_gate()
    pool.workers[0].kill()
    pool.wait_for("unreachable", "waiting_for_weights")
    # Its model is neither old nor new: it must not serve as the initial one.
    assert "closed the connection" in pool.status()[0]["last_end"]
    assert pool.server.post("/generate/", {"prompts": [[1]]}).json()["error"]["code"] == (
        "weights_lost"
    )
    answer = pool.server.post("/weights/accept", {}).json()
    assert [one[-8:] for one in answer["restarting"]] == ["worker-1"]
    pool.workers[1].wait(60)
    pool.start(1)
    pool.wait_for("unreachable", "ready")


def test_a_complete_update_serves_a_worker_that_was_cut_off_half_way(pool: Pool):
    pool.start_gated(0)
    pool.start(1)
    pool.serve(2)
    pool.update(2)
    pool.restart(1)
    pool.wait_at_gate()
    pool.workers[0].kill()
    pool.wait_for("unreachable", "waiting_for_weights")
    pool.start(0)
    pool.wait_for("waiting_for_weights", "waiting_for_weights")
    pool.update(2, "two")
    pool.wait_for("ready", "ready")
    assert pool.server.generate([[1, 2]] * 9)["completion_ids"] == [[2, 1]] * 9


def test_an_update_does_not_wait_for_a_worker_that_fetches(
    pool: Pool, background: Callable[[Callable[[], Any]], None]
):
    pool.start_gated(0)
    pool.start(1)
    pool.serve(2)
    pool.update(2)
    pool.restart(1)
    pool.wait_at_gate()
    pool.server.post("/weights/close", {"session": "one"})
    background(lambda: pool.update(1, "two"))
    wait_until(lambda: pool.status()[0]["session"] == "two", 20)
    pool.gate.touch()
    # It has the old weights, or a half of them, and fetches the new ones.
    pool.wait_for("ready", "ready")
    wait_until(lambda: [one["weight_version"] for one in pool.status()] == [2, 2], 20)
    assert len(set(pool.digests())) == 1


def test_updates_of_trl_go_on_when_a_fetch_ends_meanwhile(pool: Pool, port: int):
    pool.start_gated(0)
    pool.start(1)
    pool.serve(2)
    pool.update(2)
    pool.restart(1)
    pool.wait_at_gate()
    server = pool.server
    server.post("/weights/close", {"session": "one"})
    pool.wait_for("ready", "fetching_weights")
    # TRL's client asks first; a rank that never comes would keep the group from forming.
    assert server.get("/get_world_size/").json() == {"world_size": 1}
    group = {"host": "127.0.0.1", "port": port, "world_size": 2, "client_device_uuid": ""}
    answer = server.post("/init_communicator/", group)
    assert answer.status_code == 200, answer.text
    for index in range(6):
        # A stub takes any tensors for a whole update.
        if index == 3:
            pool.gate.touch()
            pool.wait_for("ready", "ready")
        tensor = {"name": f"w{index}", "dtype": "float32", "shape": [2]}
        answer = server.post("/update_named_param/", tensor)
        assert answer.status_code == 200, answer.text
    assert server.post("/reset_prefix_cache/", {}).status_code == 200
    # The group cannot reach the newcomer, which takes the weights from the member.
    versions = lambda: {one["weight_version"] for one in pool.status()}  # noqa: E731
    wait_until(lambda: len(versions()) == 1 and pool.phases() == ["ready"] * 2, 30)
    assert min(versions()) > 1
    assert len(set(pool.digests())) == 1


def test_other_tensors_are_refused_and_nothing_is_overwritten(pool: Pool):
    pool.start_and_serve(2)
    before = pool.digests()
    pool.update(2)
    pool.restart(1, "--tensors", "16")
    pool.wait_for_reason(1, "has other tensors: expected .low", "last_end")
    pool.wait_for("ready", "waiting_for_weights")
    assert before[0] != pool.digests()[0]
    # The next complete update serves it.
    pool.server.post("/weights/close", {"session": "one"})
    pool.update(2, "two")
    pool.wait_for("ready", "ready")


def test_a_worker_that_nobody_can_help_says_why_and_waits(pool: Pool):
    pool.start(0, "--delay-s", "0")
    pool.start(1)
    pool.serve(2)
    pool.update(2)
    pool.restart(1)
    pool.wait_for_reason(1, "0: a stub has no tensors")
    pool.wait_for("ready", "waiting_for_weights")
    assert "were sent through a group" in pool.status()[1]["why_behind"]
    assert pool.status()[0]["why_behind"] is None
