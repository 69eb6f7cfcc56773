"""A worker that sends arbitrary frames: front ends survive, and other workers' results stay right.

The pool trusts its workers. A worker that sends wrong messages may spoil its own jobs, and make the
pool believe in other weights, a pause or another model. No message may end or hang a front end,
spoil another worker's jobs, or have effects that the calls for recovery cannot undo.
"""

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.servers import wait_until
from tests.all.fuzz.exploring import TIMEOUT_S, ServerGone, explore
from tests.all.fuzz.frames import Parts, encode, message_of, parts_of
from tests.all.fuzz.stub_pool import stub_pool
from titopool.settings.sampling import SamplingOptions
from titopool.wire import messages
from titopool.wire.messages import (
    Chunk,
    Completed,
    EndWaiting,
    Failed,
    Generate,
    Heartbeat,
    ListRequests,
    Load,
    Stopping,
    WorkerCounters,
    WorkerFacts,
)
from titopool.wire.pool_state import PoolState, PoolWeights
from titopool.wire.sockets import bind_router, connect_dealer

pytestmark = pytest.mark.timeout(TIMEOUT_S)

# Longer than a busy machine stands still.
REQUEST_S = 10.0
SETTINGS = {
    "heartbeat_interval_s": "0.05", "heartbeat_timeout_s": "20", "request_timeout_s": str(REQUEST_S),
    "weight_update_timeout_s": "0.5", "placement": "round_robin",
}  # fmt: skip
# Seconds in which a front end handles what it was sent, on a busy machine.
SETTLE_S = 5.0
MAX_GROWTH_BYTES = 64 * 2**20
NUM_REQUESTS = 4


class FakeWorker:
    """A ROUTER socket at a worker's endpoint, read by its own thread."""

    def __init__(self, endpoint: str):
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = bind_router(self._context, endpoint, "")
        self._lock = threading.Lock()
        # Sockets of front ends that sent a message since the last `Stopping`.
        self.peers: dict[bytes, None] = {}
        self._stopped_peers: set[bytes] = set()
        # First ids of prompts received here, and the keys of their jobs by socket.
        self.prompts: set[int] = set()
        self.jobs: dict[bytes, list[tuple[int, int]]] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._is_closing:
            with self._lock:
                while self._router.poll(0):
                    self._take(*self._router.recv_multipart())
            time.sleep(0.002)

    def _take(self, peer: bytes, frame: bytes) -> None:
        message = messages.decode_to_worker(frame)
        if peer in self._stopped_peers:
            return
        self.peers[peer] = None
        if isinstance(message, Generate):
            for job in message.jobs:
                self.prompts.add(int(np.frombuffer(job.prompt_token_ids, np.int32)[0]))
                self.jobs.setdefault(peer, []).append((job.job_id, job.attempt))

    def send(self, frames: tuple[bytes, ...]) -> None:
        """Sends to every connected front end, with the keys of one of the front end's own jobs."""
        with self._lock:
            for peer in list(self.peers):
                key = (self.jobs.get(peer) or [(1, 1)])[-1]
                mine = tuple(_with_key(frame, key) for frame in frames)
                self._router.send_multipart([peer, *mine])

    def stop(self) -> None:
        """Sends `Stopping`: front ends then connect with new sockets."""
        with self._lock:
            for peer in self.peers:
                self._router.send_multipart([peer, encode(Stopping(""))])
            self._stopped_peers |= self.peers.keys()
            self.peers.clear()
            self.jobs.clear()

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(10)
        self._context.destroy(linger=0)


# Five bytes each, like a job's number in MessagePack with 32 bits.
JOB_ID, ATTEMPT = 2**31 + 12_345_678, 2**31 + 12_345_679


def _with_key(frame: bytes, key: tuple[int, int]) -> bytes:
    for placeholder, value in zip((JOB_ID, ATTEMPT), key, strict=True):
        frame = frame.replace(encode(placeholder), b"\xce" + value.to_bytes(4, "big"))
    return frame


class Target:
    """The pool, its fake worker, and the heartbeat of its real worker."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._threads = concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS)
        self._next_id = 1
        self.num_sent = 0
        # Statuses of requests whose job went to the fake worker.
        self.statuses: dict[int, int] = {}
        self._start()

    def _start(self) -> None:
        with ExitStack() as stack:
            self.fake_worker = FakeWorker(f"ipc://{self._run_dir}/worker-1")
            stack.callback(self.fake_worker.close)
            context = stub_pool(self._run_dir, num_workers=1, num_endpoints=2, **SETTINGS)
            self.pool = stack.enter_context(context)
            self.beat = _real_heartbeat(f"ipc://{self._run_dir}/worker-0")
            assert self.beat.facts == FACTS
            # Whether the pool was told something untrue; then it may refuse good requests.
            self.has_lied = False
            wait_until(lambda: len(self.fake_worker.peers) == 2, SETTLE_S)
            self._stack = stack.pop_all()

    def start_requests(self) -> list[concurrent.futures.Future[None]]:
        """Starts good requests at both front ends; each completes, or waits at the fake worker."""
        first = self._next_id
        self._next_id = first % 30_000 + NUM_REQUESTS
        ids = range(first, first + NUM_REQUESTS)
        self.fake_worker.prompts.difference_update(ids)
        started = [self._threads.submit(self._generate, one, one % 2) for one in ids]
        deadline = time.monotonic() + SETTLE_S / 10
        while time.monotonic() < deadline and not all(
            future.done() or one in self.fake_worker.prompts
            for future, one in zip(started, ids, strict=True)
        ):
            time.sleep(0.002)
        return started

    def _generate(self, first_id: int, front_end: int) -> None:
        body = {"prompts": [[first_id, 2]]}
        one = self.pool.front_ends[front_end]
        answer = one.call("POST", "/generate", body, within_s=REQUEST_S + SETTLE_S)
        if first_id in self.fake_worker.prompts:
            self.statuses[answer.status_code] = self.statuses.get(answer.status_code, 0) + 1
            return
        is_right = answer.status_code == 200 and answer.json()["completion_ids"] == [[2, first_id]]
        is_refused = self.has_lied and answer.status_code in (400, 404, 503, 504)
        is_refused |= self.has_lied and answer.ok and answer.json()["finish_reasons"] == ["abort"]
        assert is_right or is_refused, f"{answer.status_code} {answer.text}"

    def send(self, parts: Parts) -> None:
        """Sends to both front ends."""
        self.has_lied |= any(map(self._is_lie, parts.frames))
        self.fake_worker.send(parts.frames)
        self.num_sent += 1

    def _is_lie(self, frame: bytes) -> bool:
        try:
            beat = messages.decode_from_worker(frame)
            if isinstance(beat, EndWaiting):
                return True
        except messages.UNREADABLE:
            return False
        return isinstance(beat, Heartbeat) and (
            beat.facts not in (None, FACTS)
            or not 0 <= beat.loaded_s <= self.beat.loaded_s
            or beat.pool != PoolState()
        )

    def close(self) -> None:
        self._stack.close()

    def check(self, ends: list[BaseException | None]) -> None:
        """Raises AssertionError unless the pool recovers, by itself or through the recovery calls.

        A pool that does not recover is started again, so that hypothesis can look for a smaller
        example.
        """
        try:
            self._check()
            assert not any(ends), ends
        except (AssertionError, ServerGone) as error:
            self.close()
            self._start()
            raise AssertionError(str(error)) from None

    def _check(self) -> None:
        self.pool.check_processes()
        wait_until(self._is_served, SETTLE_S, self._description)
        wait_until(lambda: len(self.fake_worker.peers) == 2, SETTLE_S, self._description)
        self.has_lied = False

    def _is_served(self) -> bool:
        first = self.pool.front_ends[0]
        ready = [self._get("/ready", end)["workers"][0]["phase"] for end in (0, 1)]
        if "stale" in ready or "waiting_for_weights" in ready:
            first.call("POST", "/weights/accept", {}, within_s=SETTLE_S)
        if self._get("/is_paused", 0)["is_paused"]:
            first.call("POST", "/resume", {}, within_s=SETTLE_S)
        resources = [self._get("/fuzz/held", end) for end in (0, 1)]
        is_free = all(one["commands"] == one["jobs"] == one["places"] == 0 for one in resources)
        return ready == ["ready", "ready"] and is_free and all(map(self._is_right, (0, 1)))

    def _is_right(self, front_end: int) -> bool:
        answer = self.pool.front_ends[front_end].call(
            "POST", "/generate", {"prompts": [[1, 2, 3]]}, within_s=REQUEST_S + SETTLE_S
        )
        return bool(answer.ok) and answer.json()["completion_ids"] == [[3, 2, 1]]

    def _get(self, path: str, front_end: int) -> Any:
        return self.pool.front_ends[front_end].call("GET", path, within_s=SETTLE_S).json()

    def _description(self) -> str:
        answers = [self._get(path, end) for path in ("/ready", "/fuzz/held") for end in (0, 1)]
        return f"{answers}\n{self.pool.server.log[-3000:]}"

    def memory_bytes(self) -> int:
        pids = [one.pid for one in self.pool.front_ends]
        return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)


def _real_heartbeat(endpoint: str) -> Heartbeat:
    context: zmq.Context[Any] = zmq.Context()
    with connect_dealer(context, endpoint, "") as socket:
        socket.send(messages.encode(messages.Hello()))
        assert socket.poll(5000)
        beat = messages.decode_from_worker(socket.recv())
    context.destroy(linger=0)
    assert isinstance(beat, Heartbeat)
    return beat


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with closing(Target(tmp_path)) as found:
        yield found


FACTS = WorkerFacts(
    model="stub", tokenizer="none", tokenizer_revision=None, trust_remote_code=False,
    vllm_version="0.0-stub", sampling_fields=list(SamplingOptions.__struct_fields__), max_model_len=4096, vocab_size=50_000,
    max_num_seqs=256, max_logprobs=20, world_size=1, num_cache_tokens=100_000,
    max_loras=8, dtype="torch.float32", logprobs_mode="processed_logprobs", weight_backend="gloo",
    max_lora_rank=16,
)  # fmt: skip
_facts = st.just(msgspec.to_builtins(FACTS))
# Makes the fake worker eligible for jobs.
GOOD_BEAT = Heartbeat(
    worker_id="1", incarnation="a", phase="ready", phase_s=0.0, weights=PoolWeights(), facts=FACTS,
    loaded_s=0.0, num_front_ends=2, other_sequences=0, other_tokens=0, num_sequences=0,
    counters=WorkerCounters(),
)  # fmt: skip
_hints = {
    "job_id": st.just(JOB_ID), "attempt": st.just(ATTEMPT), "incarnation": st.sampled_from(("a", "a", "b")),
    "phase": st.just("ready"), "worker_id": st.just("1"), "loaded_s": st.just(0.0), "facts": _facts,
    "num_front_ends": st.just(2), "other_sequences": st.just(0), "other_tokens": st.just(0),
    "token_ids": st.sampled_from((b"\7\0\0\0", b"", b"\1\0\0\0\2\0\0\0")), "finish_reason": st.just("length"),
    "model": st.sampled_from(("stub", "", "other")), "prefixes": st.sampled_from((b"", b"\0" * 16)),
    "code": st.sampled_from(("", "invalid_request", "x")), "logprobs": st.none(),
}  # fmt: skip
_beat = message_of(Heartbeat, _hints)
_results = st.fixed_dictionaries(
    {
        "type": st.just("results"),
        "results": st.lists(
            st.one_of([message_of(one, _hints) for one in (Completed, Completed, Failed, Chunk)]), min_size=1, max_size=2
        ),
    }
)  # fmt: skip
_done = message_of(messages.CommandDone, _hints)
_others = [message_of(one, _hints) for one in (Load, Stopping, EndWaiting, ListRequests)]
scripts = st.lists(
    parts_of(st.one_of(_beat, _beat, _results, _results, _done, *_others)), min_size=1, max_size=8
)


def test_front_ends_survive_any_frame(target: Target) -> None:
    sizes: list[int] = []

    @settings(max_examples=40)
    @given(is_trusted=st.sampled_from((True, True, True, False)), script=scripts)
    @example(is_trusted=True, script=[Parts((b"\x82\xa4type\xa8stopping\xa6reason\xa1\xff",))])
    def check_script(is_trusted: bool, script: list[Parts]) -> None:
        if is_trusted:
            target.send(Parts((encode(GOOD_BEAT),)))
        # If the fake worker is trusted, some of these jobs are routed to it.
        started = target.start_requests()
        for parts in script:
            target.send(parts)
        # The fake worker's unfinished jobs go to the real worker.
        target.fake_worker.stop()
        ends = [one.exception() for one in started]
        target.check(ends)

    began = time.monotonic()
    explore(
        check_script, check_script, name="front-end frames", share=0.13,
        between=lambda: sizes.append(target.memory_bytes()),
    )  # fmt: skip
    print(f"{target.num_sent} messages in {time.monotonic() - began:.0f} s; RSS {sizes}")
    print(f"jobs of the pretender, by status: {dict(sorted(target.statuses.items()))}")
    assert sizes[-1] - sizes[min(1, len(sizes) - 1)] < MAX_GROWTH_BYTES, sizes
