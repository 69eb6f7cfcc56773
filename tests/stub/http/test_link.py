"""The link's loop: a fault of one worker or one message does not affect other workers."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import gevent
import pytest
import zmq

import app.pool.discovery
import app.pool.link
from app.pool.link import Link
from app.pool.request import Request
from app.pool.worker_socket import ConnectionState, WorkerSocket
from harness.servers import wait_until
from tests.kit.workers.pools import beat, request_of
from titopool.deadline import Deadline
from titopool.settings.config import ServerConfig
from titopool.wire.messages import (
    Abort,
    Chunk,
    Hello,
    Job,
    Results,
    ToWorker,
    decode_to_worker,
    encode,
)
from titopool.wire.run_dir import endpoints_file, write_endpoints
from titopool.wire.sockets import bind_router

JOB = Job(1, 1, b"\0" * 8, 1, 9, b"", is_streamed=True)


class RecordingSocket:
    """Stands in for a worker's socket; records the messages sent."""

    sent: ClassVar[list[tuple[str, ToWorker]]] = []
    refuses: ClassVar[set[str]] = set()

    def __init__(self, context: object, endpoint: str, key_file: str, on_change: object):
        if endpoint in self.refuses:
            raise OSError("cannot connect")
        self.endpoint, self.is_closed, self.is_connected = endpoint, False, True

    def send(self, frame: bytes) -> None:
        self.sent.append((self.endpoint, decode_to_worker(frame)))

    def receive(self) -> None:
        return None

    def read_state(self) -> ConnectionState:
        return "open"

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> type[RecordingSocket]:
    monkeypatch.setattr(app.pool.link, "WorkerSocket", RecordingSocket)
    RecordingSocket.sent, RecordingSocket.refuses = [], set()
    return RecordingSocket


def link_to(*endpoints: str) -> Link:
    link = Link(ServerConfig(run_dir="run", num_workers=1, heartbeat_interval_s=0.05), ())
    link._discovery = SimpleNamespace(  # type: ignore[assignment]
        endpoints=frozenset(endpoints), start=lambda: None, close=lambda: None
    )
    link._context = None  # type: ignore[assignment]
    return link


def endpoints_sent(sockets: type[RecordingSocket], kind: type) -> list[str]:
    return [endpoint for endpoint, message in sockets.sent if isinstance(message, kind)]


def test_an_endpoint_that_cannot_be_connected_does_not_affect_the_others(sockets):
    sockets.refuses = {"bad"}
    link = link_to("bad", "good")
    for _ in range(4):
        link._tick()
    assert endpoints_sent(sockets, Hello) == ["good"] * 4
    (bad,) = [view for view in link.workers if view.endpoint == "bad"]
    assert "cannot connect" in bad.reason
    # Connecting is retried with backoff.
    sockets.refuses = set()
    link._retries["bad"].not_before = Deadline(0.0)
    link._tick()
    assert "bad" in endpoints_sent(sockets, Hello)


def test_a_worker_that_was_down_gets_one_hello_and_gets_it_at_once(tmp_path: Path):
    endpoint = f"ipc://{tmp_path}/worker-0"
    link = Link(ServerConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=10), (endpoint,))
    link.start()
    try:
        gevent.sleep(1.0)
        with zmq.Context() as context, bind_router(context, endpoint, "") as router:
            times: list[float] = []
            while not times or time.monotonic() - times[0] < 0.5:
                while router.poll(0):
                    assert isinstance(decode_to_worker(router.recv_multipart()[1]), Hello)
                    times.append(time.monotonic())
                gevent.sleep(0.005)
        # Of this half second; twenty would have waited for the worker.
        assert sum(at - times[0] < 0.03 for at in times) <= 2
        assert 2 <= len(times) <= 12
    finally:
        link.close()


def test_a_look_up_knows_what_a_file_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a wait, before the link's own look-ups do; a link that is closed stays as it is."""
    monkeypatch.setattr(app.pool.discovery, "LOOK_UP_EVERY_S", 60.0)
    names = [f"ipc://{tmp_path}/worker-{index}" for index in range(3)]

    def known_of(link: Link) -> list[str]:
        link.look_up_workers()
        return [view.endpoint for view in link.workers]

    write_endpoints(str(tmp_path), names[:1])
    link = Link(ServerConfig(), (endpoints_file(str(tmp_path)),))
    assert known_of(link) == []
    link.start()
    try:
        gevent.sleep(0.1)
        assert known_of(link) == names[:1]
        write_endpoints(str(tmp_path), names[:2])
        assert known_of(link) == names[:2]
    finally:
        link.close()
    write_endpoints(str(tmp_path), names)
    assert known_of(link) == names[:2]


def test_a_failing_step_does_not_make_the_loop_spin(sockets, caplog):
    link = link_to("good")
    iterations: list[float] = []

    def fail() -> list[object]:
        iterations.append(time.monotonic())
        raise RuntimeError("staged")

    link._pool.assign = fail  # type: ignore[method-assign]
    link.start()
    num_sleeps = 0
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        gevent.sleep(0.05)
        num_sleeps += 1
    link.close()
    gevent.sleep(0.1)
    # One iteration per tick; Hello is still sent; the error is logged once.
    assert 5 <= len(iterations) <= 40
    assert len(endpoints_sent(sockets, Hello)) >= 5
    assert num_sleeps >= 10
    assert caplog.text.count("goes on after an error") == 1


def test_a_worker_that_sends_faster_than_it_is_read_holds_up_nobody(sockets, monkeypatch):
    link, frame, num_turns = link_to("good"), encode(Results([])), 0
    link._tick()
    worker = link._pool.workers["good"]
    worker.heartbeat, worker.last_seen = beat("good"), time.monotonic()
    ends_s = time.monotonic() + 1.0
    monkeypatch.setattr(
        sockets, "receive", lambda _: frame if time.monotonic() < ends_s else None, raising=True
    )
    link._on_change(link._sockets["good"])
    link.start()
    try:
        while time.monotonic() < ends_s:
            gevent.sleep(0.001)
            num_turns += 1
        assert num_turns > 5
        # Its heartbeats are behind what was not read, and it gets those of this process.
        assert time.monotonic() - worker.last_seen < 0.5
        assert endpoints_sent(sockets, Hello).count("good") > 3
    finally:
        link.close()


def test_a_live_worker_that_dns_leaves_out_is_kept(sockets):
    link = link_to("a", "b")
    link._tick()
    for endpoint in "ab":
        link._handle(endpoint, beat(endpoint))
    request = Request([JOB])
    link.submit(request)
    link._read_and_send()
    (busy,) = [worker for worker in link._pool.workers.values() if worker.jobs]
    link._pool.on_results(busy.endpoint, [Chunk(1, 1, [])])
    all_endpoints = link._discovery.endpoints
    link._discovery.endpoints = all_endpoints - {busy.endpoint}  # type: ignore[misc]
    for _ in range(3):
        link._tick()
    assert request.error is None
    assert endpoints_sent(sockets, Abort) == []
    # A lost worker that DNS leaves out is removed.
    link._lose(busy.endpoint, "silent")
    link._tick()
    assert [view.endpoint for view in link.workers] == list(all_endpoints - {busy.endpoint})
    link._discovery.endpoints = all_endpoints  # type: ignore[misc]
    link._tick()
    assert {view.endpoint for view in link.workers} == all_endpoints


def test_jobs_do_not_wait_for_a_burst_of_handlers(sockets, monkeypatch):
    link = link_to("a")
    link._tick()
    link._handle("a", beat("a"))

    def submit(*job_ids: int) -> list[list[int]]:
        """The jobs of each message that was sent until the link's greenlet may run."""
        before = len(sockets.sent)
        for one in job_ids:
            link.submit(request_of(9, first_id=one))
        return [[job.job_id for job in message.jobs] for _, message in sockets.sent[before:]]

    monkeypatch.setattr(app.pool.link, "SEND_WITHIN_S", 0.0)
    assert submit(1) == [[1]]
    monkeypatch.setattr(app.pool.link, "SEND_WITHIN_S", 60.0)
    assert submit(2, 3, 4) == [[2]]
    link._read_and_send()
    assert [job.job_id for job in sockets.sent[-1][1].jobs] == [3, 4]


def test_a_wrong_curve_key_is_reported_once(start_stub_at, stub_server, tmp_path: Path):
    from harness.servers import free_port, wait_until

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
    assert server.log.count("closes connections") == 1
    answer = server.post("/generate/", {"prompts": [[1]]})
    assert answer.status_code == 503
    assert "curve_key_file" in answer.json()["error"]["message"]
    # The log has the reason of the failed request, too.
    assert server.log.count("closes connections") == 2


def test_each_connection_to_a_worker_that_listens_is_seen(tmp_path: Path):
    """A worker whose connection is not seen gets no Hello."""
    endpoint = f"ipc://{tmp_path}/worker"
    with zmq.Context() as context, bind_router(context, endpoint, ""):
        for _ in range(20):
            found = WorkerSocket(context, endpoint, "", lambda one: None)
            wait_until(lambda one=found: one.read_state() == "connected", 5)
            found.close()
