"""When a worker takes another one's weights, and what a failure leaves; the engine records its calls."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit.workers.recording_engine import RecordingEngine, Worker, pool_state, run
from titopool.errors import InvalidRequest, WeightUpdateFailed
from titopool.wire.commands import (
    AbortUpdate,
    AwaitStep,
    ClearCaches,
    FetchWeights,
    GetStatus,
    JoinGroup,
    LeaveGroup,
    OfferWeights,
    Pause,
    Peer,
    Resume,
)
from titopool.wire.messages import Job
from titopool.wire.pool_state import PoolWeights
from workers.ledger import Ledger

WEIGHTS = PoolWeights(3, "u", 5, False)
FETCH = FetchWeights(WEIGHTS, [Peer("127.0.0.1:1", "key")])


class Engine(RecordingEngine):
    """Fails, or stands still, at the steps of a fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, Exception] = {}
        # Set: the bytes arrive.
        self.may_fetch = asyncio.Event()
        self.may_fetch.set()

    async def call(self, method: str, *args: Any) -> list[Any]:
        found = await super().call(method, *args)
        if method == "fetch":
            await self.may_fetch.wait()
        if method in self.errors:
            raise self.errors[method]
        return found


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker that has restarted, and lacks the pool's weights."""
    monkeypatch.setattr("tests.kit.workers.recording_engine.RecordingEngine", Engine)
    Ledger(str(tmp_path), "0").write(pool_state(WEIGHTS))
    return Worker(str(tmp_path), timeout_s=10)


async def has_phase(worker: Worker, phase: str) -> None:
    async with asyncio.timeout(10):
        while worker.control.phase != phase:
            await asyncio.sleep(0.01)


async def why_behind(worker: Worker) -> str:
    return str((await worker.good(GetStatus()))["why_behind"])


def test_weights_are_fetched_while_generation_stands(worker: Worker):
    async def story(worker: Worker) -> None:
        await worker.good(FETCH)
        await worker.good(AwaitStep("fetch", "u"))
        assert worker.control.phase == "ready"

    engine = run(story, worker).engine
    assert engine.calls == ["compare", "pause keep", "clear", "fetch", "resume"]
    assert engine.versions.current == 5


def test_a_worker_in_a_group_or_with_jobs_fetches_nothing(worker: Worker):
    async def story(worker: Worker) -> None:
        other = FetchWeights(PoolWeights(4, "v", 6, False), FETCH.peers)
        assert (await worker.ask(other)).code == "conflict"
        await worker.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2))
        await worker.good(AwaitStep("join", "s"))
        assert "session s" in (await worker.ask(FETCH)).message
        await worker.good(LeaveGroup("s"))
        with worker.engine.versions.job(Job(1, 0, b"", 1, 1, msgspec.Raw()), stop=lambda: None):
            assert "1 jobs are open" in (await worker.ask(FETCH)).message
        worker.engine.may_fetch.clear()
        await worker.good(FETCH)
        assert (await worker.ask(FETCH)).code == "conflict"
        await has_phase(worker, "fetching_weights")

    assert "pause keep" in run(story, worker).engine.calls


def test_a_worker_whose_trainer_is_gone_fetches(worker: Worker):
    async def story(worker: Worker) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            await worker.good(JoinGroup("s", "vllm", "gloo", "127.0.0.1", port, 1, 2))
            await worker.good(AwaitStep("join", "s"))
            assert "session s" in (await worker.ask(FETCH)).message
        await worker.good(FETCH)
        await worker.good(AwaitStep("fetch", "u"))
        assert worker.control.phase == "ready"
        # The next trainer replaces the session.
        assert await worker.state() == "open"
        await worker.good(JoinGroup("s2", "trl", "gloo", "127.0.0.1", 1, 0, 2))

    assert run(story, worker).engine.versions.current == 5


def test_a_peer_with_another_model_changes_nothing(worker: Worker):
    async def story(worker: Worker) -> None:
        worker.engine.errors["compare"] = InvalidRequest("other tensors")
        await worker.good(FETCH)
        await worker.ask(AwaitStep("fetch", "u"))
        assert worker.control.phase == "waiting_for_weights"
        assert worker.control.weights.is_initial
        assert "other tensors" in await why_behind(worker)

    assert run(story, worker).engine.calls == ["compare", "drop"]


def test_a_model_that_is_half_another_one_s_never_generates(worker: Worker):
    async def story(worker: Worker) -> None:
        worker.engine.errors["fetch"] = WeightUpdateFailed("cut off")
        await worker.good(FETCH)
        await worker.ask(AwaitStep("fetch", "u"))
        assert worker.control.phase == "waiting_for_weights"
        assert not worker.control.weights.is_initial
        assert "cut off" in await why_behind(worker)
        # A trainer may pause the pool and empty its caches before the update that frees this worker.
        await worker.good(Pause("keep", 60, 1))
        await worker.good(ClearCaches("caches"))
        await worker.good(AwaitStep("clear", "caches"))
        await worker.good(Resume(2))
        # The watch finds no commit that has ended.
        await asyncio.sleep(0.3)
        assert "resume" not in worker.engine.calls
        worker.engine.errors.clear()
        await worker.good(FETCH)
        await worker.good(AwaitStep("fetch", "u"))
        assert worker.control.phase == "ready"

    assert run(story, worker).engine.calls[-1] == "resume"


def test_an_abort_of_an_update_that_serves_elsewhere_does_not_end_the_fetch(worker: Worker):
    async def story(worker: Worker) -> None:
        worker.engine.may_fetch.clear()
        await worker.good(FETCH)
        await has_phase(worker, "fetching_weights")
        found = await worker.good(AbortUpdate("u", "its answer was lost"))
        assert found == {"is_applied": True}
        worker.engine.may_fetch.set()
        await worker.good(AwaitStep("fetch", "u"))
        assert worker.control.phase == "ready"

    run(story, worker)


def test_only_weights_that_serve_are_offered(worker: Worker):
    async def story(worker: Worker) -> None:
        done = await worker.ask(OfferWeights(WEIGHTS))
        assert (done.code, "offer" in worker.engine.calls) == ("conflict", False)

    run(story, worker)
