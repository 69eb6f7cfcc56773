"""A worker sends heartbeats whatever it parses: the largest frames of jobs."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tests.conftest import StartStub
from tests.stub_worker import Fault
from tests.test_strange_frames import Peer
from titopool.settings.config import ServerConfig
from titopool.settings.grammars import MAX_GRAMMAR_BYTES, StructuredOutputs
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire.messages import Generate, Hello, Job

MAX_PROMPTS = ServerConfig().max_completions_per_request
INTERVAL_S = 0.1
MAX_PAUSE_S = ServerConfig().heartbeat_timeout_s / 2
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


JOBS = {
    "prompts": jobs_with(100, SamplingOptions()),
    "many-grammars": jobs_with(
        1, *(msgspec.structs.replace(GRAMMAR, seed=number) for number in range(256))
    ),
}  # fmt: skip


@pytest.fixture
def peer(tmp_path: Path, start_stub: StartStub) -> Iterator[Peer]:
    """A front end of a worker whose engine has a slot for each prompt."""
    start_stub(0, "--max-num-seqs", str(MAX_PROMPTS), TITOPOOL_HEARTBEAT_INTERVAL_S=str(INTERVAL_S))
    context: zmq.Context[Any] = zmq.Context()
    found = Peer(context, f"ipc://{tmp_path}/worker-0")
    found.send(Hello())
    found.wait(lambda: found.beats and found.beats[-1].phase == "ready")
    yield found
    context.destroy(linger=0)


@pytest.mark.parametrize("name", JOBS)
def test_heartbeats_go_on_while_the_largest_request_arrives(peer: Peer, name: str):
    frame = Generate.of_jobs(peer.beats[-1].incarnation, JOBS[name])
    longest_s, last_beat, num_beats = 0.0, time.monotonic(), len(peer.beats)
    peer.send(frame)
    deadline = time.monotonic() + 120
    while peer.beats[-1].num_sequences < MAX_PROMPTS:
        assert time.monotonic() < deadline, f"{peer.beats[-1].num_sequences} jobs run"
        peer.send(Hello())
        peer.socket.poll(50)
        peer.read()
        if len(peer.beats) > num_beats:
            num_beats, last_beat = len(peer.beats), time.monotonic()
        longest_s = max(longest_s, time.monotonic() - last_beat)
    print(f"longest pause of heartbeats: {longest_s:.2f} s")
    assert longest_s < MAX_PAUSE_S
