"""Connections of workers to each other, as `titopool doctor --url` asks for them."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from app.pool.command_sender import Outcome
from app.pool.peers.connection_faults import find_connection_faults
from app.pool.records import Worker
from harness.servers import Server, free_port, wait_until
from titopool.errors import DeadlinePassed
from workers.serving.connections import find_faults


def test_a_worker_says_why_it_cannot_connect():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as full:
        open_port = one.getsockname()[1]
        # A queue of no connections that is full: the kernel drops further ones.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        full_port = full.getsockname()[1]
        with socket.create_connection(("127.0.0.1", full_port)):
            ports = open_port, full_port, closed_port = open_port, full_port, free_port()
            found = asyncio.run(find_faults([f"tcp://127.0.0.1:{port}" for port in ports], 0.5))
    assert f"tcp://127.0.0.1:{open_port}" not in found
    assert "got no answer within 0.5 s" in found[f"tcp://127.0.0.1:{full_port}"]
    assert f"--endpoint tcp://0.0.0.0:{closed_port}" in found[f"tcp://127.0.0.1:{closed_port}"]
    assert len(found) == 2


class Commands:
    """Workers that answer with `outcomes`, by name; it keeps what each was asked to try."""

    def __init__(self, workers: list[Worker], outcomes: dict[str, Any]):
        self._workers, self._outcomes = workers, outcomes
        self.tried: dict[str, list[str]] = {}

    def known_workers(self) -> list[Worker]:
        return [one for one in self._workers if one.heartbeat is not None]

    def gather_outcomes(self, workers, action, *, timeout_s):
        self.tried = {one.name: action(index).endpoints for index, one in enumerate(workers)}
        return [Outcome(one.endpoint, **self._outcomes[one.name]) for one in workers]


def worker(name: str, endpoint: str) -> Any:
    heartbeat = SimpleNamespace(worker_id=name) if name else None
    return Worker(endpoint, 0.0, heartbeat, phase="ready" if name else "unreachable")  # type: ignore[arg-type]


def test_pairs_are_named_and_only_endpoints_of_the_pool_are_tried():
    a, b, own, lost = (
        f"tcp://{one}:5555" for one in ("10.0.0.1", "[fd::2]", "127.0.0.1", "10.0.0.4")
    )
    workers = [worker("a", a), worker("b", b), worker("own", own), worker("", lost)]
    workers.append(worker("ipc", "ipc:///run/w0"))
    commands = Commands(
        workers,
        {
            "a": {"result": {"faults": {b: "refused"}}}, "own": {"result": {"faults": {}}},
            "b": {"error": DeadlinePassed("late")},
        },
    )  # fmt: skip
    num_tried, faults = find_connection_faults(commands, workers)  # type: ignore[arg-type]
    assert commands.tried == {"a": [b, lost], "b": [a, lost], "own": [a, b, lost]}
    # By "a" and "own"; nobody tries a loopback address.
    assert num_tried == 5
    assert [(one.worker, one.peer, one.peer_endpoint) for one in faults] == [
        ("a", "own", own), ("a", "b", b), ("b", None, None), (None, None, None),
    ]  # fmt: skip
    assert [one.reason for one in faults][1:3] == ["refused", "late"]
    assert "got one of loopback" in faults[0].reason
    assert "phase is unreachable" in faults[3].reason


def test_workers_that_load_try_each_other_and_a_second_call_is_refused(
    start_stub_at, stub_server, tmp_path: Path
):
    key_file = str(tmp_path / "curve.key")
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    for index, endpoint in enumerate(endpoints):
        words = ("--worker-id", str(index), "--load-until", str(tmp_path / "gate"))
        start_stub_at(endpoint, *words, TITOPOOL_CURVE_KEY_FILE=key_file)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        silent = f"tcp://127.0.0.1:{full.getsockname()[1]}"
        every = ",".join([*endpoints, silent])
        words = ("--endpoints", every, "--curve-key-file", key_file, "--num-front-ends", "1")
        server = stub_server(0, *words, num_ready=0)
        wait_until(lambda: phases_of(server).count("loading") == 2, 20, lambda: server.log)
        with ThreadPoolExecutor() as pool:
            # The front end's own connection fills the queue of the last one. The kernel drops further
            # ones, so an answer takes 5 s.
            calls = [pool.submit(server.post, "/workers/connections", None) for _ in range(4)]
            answers = sorted((one.result() for one in calls), key=lambda one: one.status_code)
    assert {one.status_code for one in answers} == {200, 409}
    assert "got one that waits for its answer" in answers[-1].json()["error"]["message"]
    found = answers[0].json()
    assert found["num_tried"] == 4
    faults = {(one["worker"], one["peer_endpoint"]) for one in found["faults"]}
    assert faults == {("0", silent), ("1", silent), (None, None)}


def phases_of(server: Server) -> list[str]:
    return [one["phase"] for one in server.get("/ready").json()["workers"]]
