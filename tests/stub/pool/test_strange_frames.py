"""Undecodable frames and absurd values: workers and front ends read every other message."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from harness.servers import Server, wait_until
from tests.conftest import StartStub
from tests.kit.workers.worker_peer import Peer
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire import messages
from titopool.wire.messages import Drift, Generate, Heartbeat, Hello, Job
from titopool.wire.pool_state import PoolAdapters, PoolPause, PoolState, PoolWeights
from titopool.wire.sockets import bind_router

QUICK = {"TITOPOOL_HEARTBEAT_INTERVAL_S": "0.1"}
DEEP = b"\x91" * 100_000 + b"\x01"
encode = msgspec.msgpack.encode
# None of these frames may be read as a message, or keep a later frame from being read.
UNREADABLE = {
    "text-no-utf8": encode({"type": "stopping", "failure": "@"}).replace(b"\xa1@", b"\xa1\xff"),
    "deep-result": encode({"type": "command_done", "command_id": 1, "result": {"a": 0}}).replace(
        b"\xa1a\x00", b"\xa1a" + DEEP
    ),
    "session-no-utf8": encode(
        {"type": "command", "incarnation": "@", "command_id": 1, "action": {"type": "get_status"}}
    ).replace(b"\xa1@", b"\xa1\xff"),
    "deep-kwargs": encode(
        {"type": "generate", "incarnation": "", "jobs": [{"mm_processor_kwargs": {"a": 0}}]}
    ).replace(b"\xa1a\x00", b"\xa1a" + DEEP),
    "no-messagepack": b"\xc1",
    "nothing": b"",
}
# Values that fit the types but that no pool can reach.
ABSURD = [
    PoolState("stub", PoolWeights(clock=2**64 - 1)),
    PoolState("stub", PoolWeights(clock=1, version=2**64 - 1)),
    PoolState("stub", PoolWeights(clock=-1)),
    PoolState("stub", pause=PoolPause(2**64 - 1, "keep", 1.0)),
    PoolState("stub", pause=PoolPause(1, "keep", float("inf"))),
    PoolState("stub", adapters=PoolAdapters(2**64 - 1)),
]

BEAT = Heartbeat(
    "odd", "a", "loading", 0.0, PoolWeights(), None, 0.0, 1, 0, 0, 0, messages.WorkerCounters()
)


@pytest.mark.parametrize("name", UNREADABLE)
def test_no_decoder_accepts_an_unreadable_frame(name: str):
    for decode in (messages.decode_to_worker, messages.decode_from_worker):
        with pytest.raises(messages.UNREADABLE):
            decode(UNREADABLE[name])


@pytest.mark.parametrize("pool", ABSURD, ids=repr)
def test_absurd_pool_states_are_not_decoded(pool: PoolState):
    with pytest.raises(msgspec.ValidationError):
        messages.decode_to_worker(messages.encode(Hello(pool)))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def peer(tmp_path: Path, start_stub: StartStub, context: zmq.Context[Any]) -> Peer:
    """A front end of a ready stub worker."""
    start_stub(0, **QUICK)
    found = Peer(context, f"ipc://{tmp_path}/worker-0")
    found.send(Hello())
    found.wait(lambda: found.beats and found.beats[-1].phase == "ready")
    return found


@pytest.fixture
def pool(
    tmp_path: Path,
    start_stub: StartStub,
    stub_server: Callable[..., Server],
    context: zmq.Context[Any],
) -> tuple[Server, zmq.Socket[bytes]]:
    """A front end with a stub worker, and what stands for its second worker."""
    start_stub(0, **QUICK)
    router = bind_router(context, f"ipc://{tmp_path}/worker-1", "")
    return stub_server(2, "--num-front-ends", "1", num_ready=1, **QUICK), router


def test_a_worker_reads_messages_after_unreadable_frames(peer: Peer):
    # A worker that stopped at a bad frame would resume only at its next heartbeat, 100 ms later.
    for frame in [*UNREADABLE.values()] * 100:
        peer.socket.send(frame)
    peer.socket.send_multipart([b"a", b"b"])
    peer.generate(7)
    peer.wait(lambda: 7 in peer.done)


def test_a_worker_continues_after_numbers_that_it_cannot_encode(peer: Peer):
    for number in (2**64 - 1, 2**63, -1):
        peer.send(Drift(number, number))
        peer.send(Drift(1, 1))
    peer.send(Generate.of_jobs(peer.beats[-1].incarnation, [
        Job(job_id, 1, b"\1\0\0\0", 2**63, 2**64 - 1, msgspec.Raw(encode_options(SamplingOptions())))
        for job_id in (1, 2)
    ]))  # fmt: skip
    for pool in ABSURD:
        peer.send(Hello(pool))
    num_beats = len(peer.beats)
    peer.wait(lambda: len(peer.beats) > num_beats + 3)
    peer.generate(7)
    peer.wait(lambda: 7 in peer.done)
    assert peer.beats[-1].counters.num_compared_prompts == 3
    assert peer.beats[-1].pool == PoolState("stub")


def test_a_front_end_reads_messages_after_unreadable_frames(
    pool: tuple[Server, zmq.Socket[bytes]],
):
    server, router = pool
    assert router.poll(5000)
    front_end, _ = router.recv_multipart()
    for frame in [*UNREADABLE.values()] * 100:
        router.send_multipart([front_end, frame])
    for state in ABSURD:
        router.send_multipart(
            [front_end, messages.encode(msgspec.structs.replace(BEAT, pool=state))]
        )
    # Only this last heartbeat is readable.
    router.send_multipart([front_end, messages.encode(BEAT)])
    phases = lambda: [one["phase"] for one in server.get("/ready").json()["workers"]]  # noqa: E731
    wait_until(lambda: phases() == ["ready", "loading"], 5, lambda: str(phases()))
    began = time.monotonic()
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]
    assert time.monotonic() - began < 5


def of_other_wire(message: Hello | Heartbeat) -> bytes:
    """As a release says it whose messages have another version, with fields that this one has not."""
    packed = msgspec.msgpack.decode(messages.encode(message))
    return messages.encode({**packed, "wire": messages.WIRE_VERSION + 1, "later": [1]})


def test_a_worker_answers_a_front_end_of_another_wire_and_does_nothing_else_for_it(
    tmp_path: Path, peer: Peer, context: zmq.Context[Any]
):
    stranger = Peer(context, f"ipc://{tmp_path}/worker-0")
    stranger.socket.send(of_other_wire(Hello()))
    stranger.wait(lambda: stranger.beats)
    stranger.generate(3)
    num_beats = len(peer.beats)
    peer.wait(lambda: len(peer.beats) > num_beats + 3)
    assert peer.beats[-1].num_front_ends == 1
    stranger.read()
    assert len(stranger.beats) == 1
    assert not stranger.done


def test_a_front_end_leaves_a_worker_of_another_wire_alone_and_says_so(
    pool: tuple[Server, zmq.Socket[bytes]],
):
    server, router = pool
    answer = of_other_wire(BEAT)

    def shown() -> list[tuple[str, str | None]]:
        """What /ready says, once the strange worker has answered all that it has got."""
        while router.poll(0):
            front_end, frame = router.recv_multipart()
            if isinstance(messages.decode_to_worker(frame), Hello):
                router.send_multipart([front_end, answer])
        return [(one["phase"], one["reason"]) for one in server.get("/ready").json()["workers"]]

    wait_until(lambda: shown()[1][1] is not None, 10, lambda: str(shown()))
    text = f"its messages have version {messages.WIRE_VERSION + 1}, this process's"
    phase, reason = shown()[1]
    assert phase == "unreachable"
    assert text in str(reason)
    assert server.log.count(text) == 1
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]
    # It is replaced by a worker of this wire.
    answer = messages.encode(BEAT)
    wait_until(lambda: shown() == [("ready", None), ("loading", None)], 20, lambda: str(shown()))
