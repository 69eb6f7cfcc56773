"""The link's loop: what is wrong with one worker, or one message, costs the others nothing."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import gevent
import pytest

import app.pool.link
from app.pool.link import Link
from app.pool.pending import Request
from app.pool.worker_socket import ConnectionState
from tests.test_pool import beat
from titopool.deadline import Deadline
from titopool.settings.config import ServerConfig
from titopool.wire.messages import Abort, Chunk, Hello, Job, ToWorker, decode_to_worker

JOB = Job(1, 1, b"\0" * 8, 1, 9, b"", is_streamed=True)


class RecordingWire:
    """In place of a socket: keeps what is sent."""

    sent: ClassVar[list[tuple[str, ToWorker]]] = []
    refuses: ClassVar[set[str]] = set()

    def __init__(self, context: object, endpoint: str, key_file: str, on_change: object):
        if endpoint in self.refuses:
            raise OSError("cannot connect")
        self.endpoint, self.is_closed = endpoint, False

    def send(self, frame: bytes) -> None:
        self.sent.append((self.endpoint, decode_to_worker(frame)))

    def receive(self) -> None:
        return None

    def read_state(self) -> ConnectionState:
        return ConnectionState.OPEN

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> type[RecordingWire]:
    monkeypatch.setattr(app.pool.link, "WorkerSocket", RecordingWire)
    RecordingWire.sent, RecordingWire.refuses = [], set()
    return RecordingWire


def link_to(*endpoints: str) -> Link:
    link = Link(ServerConfig(run_dir="run", num_workers=1, heartbeat_interval_s=0.05), ())
    link._discovery = SimpleNamespace(  # type: ignore[assignment]
        endpoints=frozenset(endpoints), start=lambda: None, close=lambda: None
    )
    link._context = None  # type: ignore[assignment]
    return link


def told(wires: type[RecordingWire], kind: type) -> list[str]:
    return [endpoint for endpoint, message in wires.sent if isinstance(message, kind)]


def test_one_endpoint_that_cannot_be_connected_costs_the_others_nothing(wires):
    wires.refuses = {"bad"}
    link = link_to("bad", "good")
    for _ in range(4):
        link._tick()
    assert told(wires, Hello) == ["good"] * 5
    (bad,) = [view for view in link.workers if view.endpoint == "bad"]
    assert "cannot connect" in bad.reason
    # It is tried again, later and later.
    wires.refuses = set()
    link._retries["bad"].not_before = Deadline(0.0)
    link._tick()
    assert "bad" in told(wires, Hello)


def test_a_step_that_fails_does_not_turn_the_loop_into_a_busy_one(wires, caplog):
    link = link_to("good")
    turns: list[float] = []

    def fail() -> list[object]:
        turns.append(time.monotonic())
        raise RuntimeError("staged")

    link._pool.assign = fail  # type: ignore[method-assign]
    link.start()
    others = 0
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        gevent.sleep(0.05)
        others += 1
    link.close()
    gevent.sleep(0.1)
    # A turn for each tick, and Hello in spite of it; the log says so once.
    assert 5 <= len(turns) <= 40
    assert len(told(wires, Hello)) >= 5
    assert others >= 10
    assert caplog.text.count("goes on after an error") == 1


def test_a_worker_that_a_name_leaves_out_for_a_moment_stays(wires):
    link = link_to("a", "b")
    link._tick()
    for endpoint in "ab":
        link._handle(endpoint, beat(endpoint))
    request = Request([JOB])
    link.submit(request)
    link._read_and_send()
    (mine,) = [worker for worker in link._pool.workers.values() if worker.jobs]
    link._pool.on_results(mine.endpoint, [Chunk(1, 1, [])])
    everything = link._discovery.endpoints
    link._discovery.endpoints = everything - {mine.endpoint}  # type: ignore[misc]
    for _ in range(3):
        link._tick()
    assert request.error is None
    assert told(wires, Abort) == []
    # One that is gone, and left out, is forgotten.
    link._lose(mine.endpoint, "silent")
    link._tick()
    assert [view.endpoint for view in link.workers] == list(everything - {mine.endpoint})
    link._discovery.endpoints = everything  # type: ignore[misc]
    link._tick()
    assert {view.endpoint for view in link.workers} == everything


def test_another_key_than_the_workers_is_told_and_not_tried_all_the_time(
    start_stub_at, stub_server, tmp_path: Path
):
    from tests.servers import free_port, wait_until

    port = free_port()
    start_stub_at(f"tcp://127.0.0.1:{port}", TITOPOOL_CURVE_KEY_FILE=str(tmp_path / "worker.key"))
    server = stub_server(
        0, "--endpoints", f"tcp://127.0.0.1:{port}", "--curve-key-file", str(tmp_path / "other.key"),
        num_ready=0,
    )  # fmt: skip
    wait_until(lambda: server.get("/ready").json()["workers"][0]["reason"], 10)
    (worker,) = server.get("/ready").json()["workers"]
    assert worker["phase"] == "unreachable"
    assert "curve_key_file" in worker["reason"]
    answer = server.post("/generate/", {"prompts": [[1]]})
    assert answer.status_code == 503
    assert "curve_key_file" in answer.json()["error"]["message"]
    assert server.log.count("closes connections") == 1
