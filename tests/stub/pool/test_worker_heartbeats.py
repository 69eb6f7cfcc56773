"""A worker sends heartbeats whatever it parses, and from a thread while its event loop stands."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from harness.stub_worker import Fault
from tests.conftest import StartStub
from tests.kit.workers.idle_worker import make_server
from tests.kit.workers.worker_peer import Peer
from titopool.settings.config import ServerConfig
from titopool.settings.grammars import MAX_GRAMMAR_BYTES, StructuredOutputs
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.slots import num_kept
from titopool.wire import messages
from titopool.wire.messages import Generate, Hello, Job
from titopool.wire.sockets import bind_router
from workers.serving.jobs import FrontEnd

MAX_PROMPTS = ServerConfig().max_completions_per_request
INTERVAL_S = 0.1
# Of the worker's own time, so that a machine three times as slow keeps the timeout.
MAX_PAUSE_S = ServerConfig().heartbeat_timeout_s / 3
# Of one turn of the loop below: a machine that stands still stops this process as well.
MAX_TURN_S = 0.5
GRAMMAR = SamplingOptions(
    n=1, structured_outputs=StructuredOutputs(regex="a" * (MAX_GRAMMAR_BYTES - 100))
)


def jobs_with(num_tokens: int, *options: SamplingOptions) -> list[Job]:
    """As many jobs as a request may have, which never end; the options in turn."""
    ids = np.array([Fault.HANG, *range(1, num_tokens)], dtype=np.int32).tobytes()
    encoded = [msgspec.Raw(encode_options(one)) for one in options]
    return [
        Job(index, 1, ids, 1, num_tokens + 16, encoded[index % len(encoded)])
        for index in range(MAX_PROMPTS)
    ]


# Made by their test, because they take seconds.
JOBS: dict[str, Callable[[], list[Job]]] = {
    "prompts": lambda: jobs_with(100, SamplingOptions()),
    "many-grammars": lambda: jobs_with(
        1, *(msgspec.structs.replace(GRAMMAR, seed=number) for number in range(256))
    ),
}


class WorkerTime:
    """Seconds in which a worker's loop ran, or could have run.

    Not those for which the kernel let other processes run instead, nor those in which the machine
    stood still.
    """

    def __init__(self, worker: subprocess.Popen[bytes]):
        # Of the process's main thread: seconds on a CPU, seconds of waiting for one; in ns.
        self._schedule = Path(f"/proc/{worker.pid}/schedstat")
        self._last_turn = time.monotonic()
        self._awake_s, self._first_wait_s = 0.0, self._wait_s()

    def _wait_s(self) -> float:
        return int(self._schedule.read_text().split()[1]) / 1e9

    def turn(self) -> float:
        """The seconds so far; to be called in each turn of a loop that never waits long."""
        now = time.monotonic()
        self._awake_s += min(now - self._last_turn, MAX_TURN_S)
        self._last_turn = now
        return self._awake_s - (self._wait_s() - self._first_wait_s)


@pytest.fixture
def worker(start_stub: StartStub) -> subprocess.Popen[bytes]:
    """A worker whose engine has a slot for each prompt."""
    return start_stub(
        0, "--max-num-seqs", str(MAX_PROMPTS), TITOPOOL_HEARTBEAT_INTERVAL_S=str(INTERVAL_S)
    )


@pytest.fixture
def peer(tmp_path: Path, worker: subprocess.Popen[bytes]) -> Iterator[Peer]:
    """Its front end."""
    context: zmq.Context[Any] = zmq.Context()
    found = Peer(context, f"ipc://{tmp_path}/worker-0")
    found.send(Hello())
    found.wait(lambda: found.beats and found.beats[-1].phase == "ready")
    yield found
    context.destroy(linger=0)


def num_of_loop(peer: Peer) -> int:
    """Heartbeats that the worker's event loop has sent."""
    return sum(not one.loop_stood_s for one in peer.beats)


@pytest.mark.parametrize(
    "name", [pytest.param("prompts", marks=pytest.mark.variant), "many-grammars"]
)
def test_heartbeats_go_on_while_the_largest_request_arrives(
    worker: subprocess.Popen[bytes], peer: Peer, name: str
):
    # Encoded before: this takes a while, and is not the worker's.
    frame = messages.encode(Generate.of_jobs(peer.beats[-1].incarnation, JOBS[name]()))
    peer.read()
    clock, num_beats = WorkerTime(worker), num_of_loop(peer)
    longest_s = last_beat = 0.0
    peer.socket.send(frame)
    while peer.beats[-1].num_sequences < MAX_PROMPTS - num_kept(MAX_PROMPTS):
        now = clock.turn()
        assert now < 120, f"{peer.beats[-1].num_sequences} jobs run"
        peer.send(Hello())
        peer.socket.poll(50)
        peer.read()
        if num_of_loop(peer) > num_beats:
            # Only now: a wait for a CPU counts when it has ended.
            now = clock.turn()
            longest_s = max(longest_s, now - last_beat)
            num_beats, last_beat = num_of_loop(peer), now
    print(f"longest pause of heartbeats: {longest_s:.2f} s")
    assert longest_s < MAX_PAUSE_S


def test_a_thread_sends_heartbeats_while_the_loop_stands(
    worker: subprocess.Popen[bytes], peer: Peer
):
    """As the loop last stated them, on the same connection; what comes meanwhile is read afterwards."""
    options = msgspec.Raw(encode_options(SamplingOptions()))

    def jobs(first: int, *job_ids: int) -> Generate:
        ids = np.array([first, 5], dtype=np.int32).tobytes()
        made = [Job(one, 1, ids, 1, 18, options) for one in job_ids]
        return Generate.of_jobs(peer.beats[-1].incarnation, made)

    peer.send(jobs(Fault.HANG, 1, 2, 3))
    peer.wait(lambda: peer.beats[-1].num_sequences == 3)
    del peer.beats[:-1]
    peer.send(jobs(Fault.STAND, 4))
    for job_id in range(5, 45):
        peer.send(Hello())
        peer.send(jobs(7, job_id))
        time.sleep(0.02)
    peer.wait(lambda: peer.done.keys() >= {*range(4, 45)})
    stood = [one for one in peer.beats if one.loop_stood_s]
    assert len(stood) >= 3
    assert {one.num_sequences for one in stood} <= {3, 4}
    assert len({one.incarnation for one in peer.beats}) == 1
    assert [one.loop_stood_s for one in stood] == sorted(one.loop_stood_s for one in stood)
    assert 0.2 < stood[-1].loop_stood_s < 1.5
    # The thread notes a stand in its next turn.
    peer.wait(lambda: peer.beats[-1].longest_stand_s >= stood[-1].loop_stood_s)
    assert not peer.beats[-1].loop_stood_s
    assert peer.beats[-1].longest_stand_s < 1.5


@pytest.mark.parametrize("meanwhile, num_sent", [("nothing", 1), ("heartbeat", 0), ("stopping", 0)])
def test_the_thread_sends_no_state_behind_a_newer_one(
    meanwhile: str, num_sent: int, tmp_path: Path
):
    """The loop goes on, and sends, while the thread waits for the socket."""
    server, context = make_server(ServerConfig()), zmq.Context[Any]()
    endpoint = f"ipc://{tmp_path}/socket"
    server._router = bind_router(context, endpoint, "")
    peer = Peer(context, endpoint)
    peer.send(Hello())
    identity, _ = server._router.recv_multipart()
    front_end = server._front_ends[identity] = FrontEnd(time.monotonic())
    front_end.heartbeat = server._heartbeat(identity, front_end)

    class Lock:
        """Is had once the loop has sent."""

        def acquire(self, timeout: float) -> bool:
            if meanwhile == "heartbeat":
                front_end.heartbeat = server._heartbeat(identity, front_end)
            elif meanwhile == "stopping":
                server._phase = "stopping"
            return True

        def release(self) -> None:
            return None

    server._router_lock = Lock()  # type: ignore[assignment]
    server._speak_for_loop(3.0)
    peer.socket.poll(2000 if num_sent else 200)
    peer.read()
    context.destroy(linger=0)
    assert [one.loop_stood_s for one in peer.beats] == [3.0] * num_sent
