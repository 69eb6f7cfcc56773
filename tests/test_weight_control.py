"""A worker's answers to the steps of an update, with an engine that keeps a record of its calls."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titopool.commands import (
    Action,
    ApplyUpdate,
    AwaitStep,
    BeginFolder,
    BeginUpdate,
    Command,
    CommandDone,
    GetStatus,
    JoinGroup,
    Pause,
    PrepareUpdate,
    Resume,
    TensorInfo,
)
from titopool.config import ServerConfig
from titopool.errors import InvalidRequest, TitopoolError, WeightUpdateFailed
from titopool.pool_state import PoolState, PoolWeights
from workers.control import Control
from workers.ledger import Ledger, clear_ledgers, digest_of_files
from workers.versions import Versions

TIMEOUT_S = 0.8
TENSORS = [TensorInfo("w", "float32", [2, 2])]


class RecordingEngine:
    """Engine and WeightEngine in one."""

    def __init__(self) -> None:
        self.versions = Versions()
        self.weights = self
        self.adapters: Any = SimpleNamespace(versions={}, latest_versions={})
        self.calls: list[str] = []
        self.can_keep = True
        self.is_stuck = self.has_stuck_caches = False
        self.begin_error: Exception | None = None
        self.status: dict[str, Any] = {
            "is_joined": True, "error": "", "num_announced": 1, "num_received": 1,
        }  # fmt: skip

    async def call(self, method: str, *args: Any) -> list[Any]:
        if method not in ("status", "device"):
            self.calls.append(method)
        if method == "begin" and self.begin_error is not None:
            raise self.begin_error
        fit = {"missing": [], "ignored": [], "kept": [], "split_layers": ""}
        answers = {
            "begin": fit, "check": fit, "check_folder": fit, "apply": {"loaded": 1},
            "status": self.status,
        }  # fmt: skip
        return [answers.get(method, "")]

    async def pause(self, policy: str) -> None:
        self.calls.append(f"pause {policy}")
        if self.is_stuck:
            await asyncio.sleep(3600)

    async def resume(self) -> None:
        self.calls.append("resume")

    async def clear_caches(self) -> None:
        self.calls.append("clear")
        if self.has_stuck_caches:
            raise WeightUpdateFailed("staged: the cache is in use")

    async def progress(self) -> dict[str, dict[int, int]]:
        return {}


class Worker:
    """A Control and what it reported."""

    def __init__(self, run_dir: str = "", root: str = "") -> None:
        config = ServerConfig(run_dir=run_dir, weights_root=root, weight_update_timeout_s=TIMEOUT_S)
        self.engine = RecordingEngine()
        self.broken: list[str] = []
        self.control = Control(
            self.engine, config, worker_id="0",  # type: ignore[arg-type]
            on_applied=lambda: None, on_broken=self.broken.append,
        )  # fmt: skip

    async def ask(self, action: Action) -> CommandDone:
        return await self.control.answer(Command("i", 1, action))

    async def good(self, action: Action) -> dict[str, Any]:
        done = await self.ask(action)
        assert done.code == "", done.message
        return done.result

    async def begin(self) -> None:
        await self.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2))
        await self.good(AwaitStep("join", "s"))
        await self.good(BeginUpdate("s", "u", 7, 0, TENSORS, 100, False))

    async def state(self) -> str:
        return str((await self.good(GetStatus()))["state"])


def run(story: Callable[[Worker], Awaitable[None]], worker: Worker | None = None) -> Worker:
    """Plays `story` with a ready worker that watches."""
    worker = worker or Worker()

    async def play() -> None:
        await worker.control.get_ready("m")
        watch = asyncio.create_task(worker.control.watch())
        await asyncio.wait_for(story(worker), 20)
        watch.cancel()

    asyncio.run(play())
    return worker


def test_a_worker_that_is_not_ready_says_so():
    done = asyncio.run(Worker().ask(GetStatus()))
    assert done.code == "no_ready_worker"


def test_caches_are_empty_before_the_weights_change_and_generation_stands():
    async def story(worker: Worker) -> None:
        await worker.begin()
        await worker.good(PrepareUpdate("u", "abort"))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(ApplyUpdate("u"))
        await worker.good(AwaitStep("apply", "u"))

    worker = run(story)
    assert worker.engine.calls[-4:] == ["pause abort", "clear", "apply", "resume"]
    assert worker.engine.versions.current == 7
    assert worker.control.weights.num_updates == 1


@pytest.mark.parametrize(
    "error, state", [(InvalidRequest("staged"), "open"), (WeightUpdateFailed("staged"), "closed")]
)
def test_tensors_that_are_refused_leave_the_group_and_a_failure_does_not(
    error: TitopoolError, state: str
):
    async def story(worker: Worker) -> None:
        worker.engine.begin_error = error
        with socket.create_server(("127.0.0.1", 0)) as trainer:
            port = trainer.getsockname()[1]
            await worker.good(JoinGroup("s", "titopool", "gloo", "127.0.0.1", port, 1, 2))
            await worker.good(AwaitStep("join", "s"))
            done = await worker.ask(BeginUpdate("s", "u", 7, 0, TENSORS, 100, False))
        assert done.code == error.code
        assert await worker.state() == state

    run(story)


@pytest.mark.parametrize(
    "stage, code",
    [
        (lambda engine: setattr(engine, "has_stuck_caches", True), "weight_update_failed"),
        (lambda engine: setattr(engine, "is_stuck", True), "deadline_passed"),
        (lambda engine: engine.status.update(num_received=0), "deadline_passed"),
        (lambda engine: engine.status.update(error="the peer is gone"), "weight_update_failed"),
    ],
    ids=["caches-stay", "drain-hangs", "nothing-comes", "receiver-fails"],
)
def test_what_fails_before_the_weights_change_leaves_them(stage: Any, code: str):
    async def story(worker: Worker) -> None:
        await worker.begin()
        stage(worker.engine)
        await worker.good(PrepareUpdate("u", "drain"))
        done = await worker.ask(AwaitStep("prepare", "u"))
        assert done.code == code, done
        assert await worker.state() == "closed"
        assert (await worker.ask(ApplyUpdate("u"))).code == "conflict"

    worker = run(story)
    assert "apply" not in worker.engine.calls
    assert worker.engine.calls[-1] in ("drop", "resume")
    # Whoever was made to wait goes on.
    assert worker.engine.calls.count("resume") == sum("pause" in one for one in worker.engine.calls)
    assert not worker.broken


def test_generation_goes_on_when_nobody_applies_what_is_prepared():
    """The front end that would have died in between."""

    async def story(worker: Worker) -> None:
        await worker.begin()
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        assert await worker.state() == "prepared"
        while await worker.state() != "closed":
            await asyncio.sleep(0.05)

    worker = run(story)
    assert worker.engine.calls[-2:] == ["drop", "resume"]
    assert worker.engine.versions.current == 0


def test_a_lease_is_renewed_and_ends():
    async def story(worker: Worker) -> None:
        for _ in range(3):
            await worker.good(Pause("keep", 0.5))
            await asyncio.sleep(0.3)
        assert worker.engine.calls == ["pause keep"]
        await asyncio.sleep(0.7)
        assert worker.engine.calls == ["pause keep", "resume"]
        assert await worker.good(Resume()) == {"was_paused": False}

    run(story)


def of_pool(weights: PoolWeights) -> PoolState:
    return PoolState(model="m", weights=weights)


def test_a_restarted_worker_waits_or_takes_its_folder(tmp_path: Path):
    folder = tmp_path / "root" / "weights"
    folder.mkdir(parents=True)
    ledger = Ledger(str(tmp_path), "0")

    async def nothing(worker: Worker) -> None:
        return None

    def restarted() -> Worker:
        return run(nothing, Worker(str(tmp_path), str(tmp_path / "root")))

    assert restarted().control.phase == "ready"
    ledger.write(of_pool(PoolWeights(3, "u", 5, False)))
    worker = restarted()
    assert worker.control.phase == "waiting_for_weights"
    assert worker.engine.calls == []
    files = digest_of_files(str(folder))
    ledger.write(of_pool(PoolWeights(3, "u", 5, False, str(folder), files)))
    worker = restarted()
    assert worker.control.phase == "ready"
    assert (worker.engine.versions.current, worker.control.weights.num_updates) == (5, 3)
    folder.rmdir()
    assert restarted().control.phase == "waiting_for_weights"
    clear_ledgers(str(tmp_path))
    assert restarted().control.phase == "ready"


def test_a_waiting_worker_takes_whole_updates_only(tmp_path: Path):
    Ledger(str(tmp_path), "0").write(of_pool(PoolWeights(3, "before", 5, False)))

    async def story(worker: Worker) -> None:
        await worker.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2))
        await worker.good(AwaitStep("join", "s"))
        done = await worker.ask(BeginUpdate("s", "u", 6, 3, TENSORS, 100, True))
        assert done.code == "conflict"
        assert "send a complete update" in done.message
        await worker.good(BeginUpdate("s", "u", 6, 3, TENSORS, 100, False))
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(ApplyUpdate("u"))
        await worker.good(AwaitStep("apply", "u"))

    worker = run(story, Worker(str(tmp_path)))
    assert worker.control.phase == "ready"
    assert Ledger(str(tmp_path), "0").read().weights == PoolWeights(4, "u", 6, False)


def test_folders_outside_the_root_are_refused(tmp_path: Path):
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")

    async def story(worker: Worker) -> None:
        for path in ("/", str(tmp_path / "secret"), str(tmp_path / "root" / "link"), "", "root"):
            done = await worker.ask(BeginFolder("u", None, 0, path))
            assert done.code == "invalid_request", path
        assert await worker.state() == "closed"

    run(story, Worker(root=str(tmp_path / "root")))
