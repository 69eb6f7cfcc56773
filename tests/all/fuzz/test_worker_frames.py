"""A front end that sends arbitrary frames: the worker survives and serves other front ends."""

import time
from collections.abc import Iterator
from contextlib import closing
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
from tests.all.fuzz.exploring import TIMEOUT_S, explore
from tests.all.fuzz.frames import Parts, encode, message_of, parts_of
from tests.all.fuzz.stub_pool import start_worker
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire import commands, messages
from titopool.wire.commands import Command, LeaveGroup, Resume
from titopool.wire.messages import Abort, Completed, Generate, Heartbeat, Hello, Job, Results
from titopool.wire.sockets import connect_dealer

pytestmark = pytest.mark.timeout(TIMEOUT_S)

BEAT_S = 0.05
SETTINGS = {
    "heartbeat_interval_s": str(BEAT_S), "heartbeat_timeout_s": "2", "weight_update_timeout_s": "0.3",
}  # fmt: skip
# Seconds within which a well-behaved front end gets an answer.
ANSWER_S = 5.0
# Jobs in a row that commands of earlier examples may abort.
MAX_ABORTS = 20
# Allowed growth of memory over all examples: lists and tables of a few examples.
MAX_GROWTH_BYTES = 64 * 2**20


class Peer:
    """A front end's socket."""

    def __init__(self, context: zmq.Context[Any], endpoint: str):
        self.socket = connect_dealer(context, endpoint, "")
        self.incarnation, self.is_ready = "", False
        self.num_beats = 0
        self.done: dict[int, Completed] = {}
        self._num_jobs = 0

    def send(self, message: Any) -> None:
        self.socket.send(messages.encode(message))

    def read(self) -> None:
        """Reads the messages that have arrived."""
        while self.socket.poll(0):
            match messages.decode_from_worker(self.socket.recv()):
                case Heartbeat(incarnation=incarnation, phase=phase):
                    self.incarnation, self.is_ready = incarnation, phase == "ready"
                    self.num_beats += 1
                case Results(results=results):
                    self.done |= {one.job_id: one for one in results if isinstance(one, Completed)}

    def wait(self, condition: Any, what: str) -> None:
        def is_met() -> bool:
            self.read()
            return bool(condition())

        wait_until(is_met, ANSWER_S, lambda: f"the worker gives no {what}")

    def check_job(self) -> None:
        """Sends a job and checks its result; sends another one where an earlier command aborts it."""
        results = (self._result() for _ in range(MAX_ABORTS))
        assert any(one.finish_reason != "abort" for one in results)

    def _result(self) -> messages.Completion:
        self._num_jobs += 1
        job_id, ids = self._num_jobs, np.array([1, 2, self._num_jobs], np.int32)
        sampling = msgspec.Raw(encode_options(SamplingOptions()))
        self.send(
            Generate.of_jobs(self.incarnation, [Job(job_id, 1, ids.tobytes(), 1, 19, sampling)])
        )
        self.wait(lambda: job_id in self.done, "answer")
        completion = self.done.pop(job_id).completions[0]
        if completion.finish_reason != "abort":
            assert completion.token_ids == ids[::-1].tobytes()
        return completion

    def clean_up(self) -> None:
        """Ends sessions and pauses that valid fuzzed commands have begun."""
        for action in (LeaveGroup("s"), Resume(1)):
            self.send(Command(self.incarnation, 1, action))


class Target:
    """A stub worker, a well-behaved front end and two that send arbitrary frames."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.num_sent = 0
        self._start()

    def _start(self) -> None:
        self.process = start_worker(self._folder, 0, **SETTINGS)
        self._context: zmq.Context[Any] = zmq.Context()
        endpoint = f"ipc://{self._folder}/worker-0"
        self.honest, self.known, self.unknown = (Peer(self._context, endpoint) for _ in range(3))
        self.honest.send(Hello())
        self.honest.wait(lambda: self.honest.is_ready, "sign that it is ready")
        self.known.send(Hello())

    def send(self, parts: Parts, *, is_known: bool) -> None:
        peer = self.known if is_known else self.unknown
        peer.socket.send_multipart(parts.frames)
        self.num_sent += 1

    def check(self) -> None:
        """The worker is alive, and the well-behaved front end has lost nothing.

        A worker that fails is started again, so that hypothesis can look for a smaller example.
        """
        try:
            self._check()
        except AssertionError as error:
            log = self.log
            self.close()
            self._start()
            raise AssertionError(f"{error}\n{log[-3000:]}") from None

    def _check(self) -> None:
        for peer in (self.honest, self.known):
            peer.send(Hello())
        self.honest.clean_up()
        self.honest.check_job()
        before = self.honest.num_beats
        self.honest.wait(lambda: self.honest.num_beats > before, "heartbeat")
        for peer in (self.known, self.unknown):
            while peer.socket.poll(0):
                peer.socket.recv_multipart()
        assert self.process.poll() is None, "the worker has ended"

    @property
    def log(self) -> str:
        return (self._folder / "worker-0.log").read_text(errors="replace")

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with closing(Target(tmp_path)) as found:
        yield found


INCARNATION = "@incarnation@"
_options = st.builds(
    SamplingOptions, n=st.sampled_from((1, 2)), max_tokens=st.sampled_from((None, 1, 3)),
    logprobs=st.sampled_from((None, 0, 2)),
).map(lambda one: msgspec.Raw(encode_options(one)))  # fmt: skip
_ids = st.lists(st.integers(0, 30_000), min_size=1, max_size=4)
HINTS = {
    "incarnation": st.just(INCARNATION), "job_id": st.integers(1, 5), "attempt": st.just(1),
    "prompt_token_ids": _ids.map(lambda ids: np.array(ids, np.int32).tobytes()),
    "num_sequences": st.just(1), "num_tokens": st.just(20),
    "adapter": st.sampled_from(("", "", "a")), "session": st.sampled_from(("s", None)),
    "world_size": st.just(2), "host": st.just("127.0.0.1"), "protocol": st.just("trl"),
    "update_id": st.sampled_from(("u", "v")), "model": st.sampled_from(("", "stub", "other")),
    "lease_s": st.sampled_from((0.01, 1.0)), "lease_left_s": st.sampled_from((0.01, 1.0)),
}  # fmt: skip
# One valid action ends a worker, AcceptInitialWeights, and is not sent.
ACTIONS = [one for one in commands.Action.__args__ if one is not commands.AcceptInitialWeights]
_command = st.one_of([message_of(one, HINTS) for one in ACTIONS]).flatmap(
    lambda action: st.fixed_dictionaries(
        {
            "type": st.just("command"), "incarnation": st.sampled_from((INCARNATION, "", "x")),
            "command_id": st.sampled_from((1, 2, 0, -1, 2**63)), "action": st.just(action),
        }
    )
)  # fmt: skip
# A job's options are an index.
_generate = st.builds(
    lambda message, sampling: {**message, "sampling": sampling},
    message_of(Generate, {**HINTS, "sampling": st.sampled_from((0, 0, 0, 1, -1))}),
    st.lists(_options, min_size=1, max_size=2),
)
_messages = st.one_of(
    _command, _command, *[message_of(one, HINTS) for one in (Hello, Abort, messages.Drift, messages.EndedWaiting, messages.ListedRequests)],
    _generate, _generate,
)  # fmt: skip
scripts = st.lists(st.tuples(st.booleans(), parts_of(_messages)), min_size=1, max_size=10)


def test_a_worker_survives_any_frame(target: Target) -> None:
    sizes: list[int] = []

    @settings(max_examples=50)
    @given(script=scripts)
    @example(script=[(True, Parts((b"\xa1\xff",)))])
    def check_script(script: list[tuple[bool, Parts]]) -> None:
        for is_known, parts in script:
            # The two texts have 13 and 32 bytes: their MessagePack heads differ.
            old, new = encode(INCARNATION), encode(target.honest.incarnation)
            frames = tuple(frame.replace(old, new) for frame in parts.frames)
            target.send(Parts(frames), is_known=is_known)
        target.check()

    def note_size() -> None:
        sizes.append(target.memory_bytes())

    began = time.monotonic()
    explore(check_script, check_script, name="worker frames", share=0.12, between=note_size)
    print(f"{target.num_sent} messages in {time.monotonic() - began:.0f} s; RSS {sizes}")
    # The first batches allocate what later batches reuse.
    assert sizes[-1] - sizes[min(1, len(sizes) - 1)] < MAX_GROWTH_BYTES, sizes
