"""A worker's weight control over an engine that records its calls."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from titopool.errors import WeightUpdateFailed
from titopool.settings.config import ServerConfig
from titopool.wire.commands import (
    Action,
    AnnounceTensors,
    AwaitStep,
    Command,
    CommandDone,
    GetStatus,
    JoinGroup,
    TensorInfo,
)
from titopool.wire.pool_state import PoolPause, PoolState, PoolWeights
from workers.engine.versions import Versions
from workers.serving.control import Control
from workers.serving.front_end_queues import FrontEndQueues

TIMEOUT_S = 0.8
TENSORS = [TensorInfo("w", "float32", [2, 2])]


def announcement(update_id: str, version: int | None = None, **fields: Any) -> AnnounceTensors:
    """Begins an update of `TENSORS` in session s."""
    return AnnounceTensors(
        "named", update_id, version, 1, session="s", tensors=TENSORS, packed=True, packed_bytes=100,
        **fields,
    )  # fmt: skip


class RecordingEngine:
    """Engine and WeightEngine in one."""

    def __init__(self) -> None:
        self.versions = Versions()
        self.weights = self
        self.adapters: Any = SimpleNamespace(versions={}, latest_versions={})
        self.calls: list[str] = []
        self.can_keep = True
        self.is_stuck = self.has_stuck_caches = False
        # Set: the caches can be cleared.
        self.may_clear = asyncio.Event()
        self.may_clear.set()
        self.begin_error: Exception | None = None
        # Names of tensors that the model does not load, and why their values do not fit.
        self.ignored: list[str] = []
        self.head_error: Exception | None = None
        self.staging = "beside"
        self.drop_error: Exception | None = None
        self.load_error: Exception | None = None
        # Whether the call that loads in place waits for the trainer.
        self.load_waits = False
        self.status: dict[str, Any] = {
            "is_joined": True, "error": "", "num_announced": 1, "num_received": 1, "awaited": None,
        }  # fmt: skip

    async def call(self, method: str, *args: Any) -> list[Any]:
        if method not in ("status", "device"):
            self.calls.append(method)
        if method == "status":
            self.status["num_looks"] = self.status.get("num_looks", 0) + 1
        if method == "join":
            self.join_args = args[0]
        if method == "drop" and self.drop_error is not None:
            raise self.drop_error
        if method == "load":
            if self.load_waits:
                await asyncio.sleep(3600)
            if self.load_error is not None:
                raise self.load_error
        if method in ("begin", "check_folder") and self.begin_error is not None:
            raise self.begin_error
        if method == "compare_heads" and self.head_error is not None:
            raise self.head_error
        fit = {
            "missing": [], "ignored": self.ignored, "kept": [], "split_layers": "", "staging": self.staging,
        }  # fmt: skip
        answers = {
            "begin": fit, "check": fit, "check_folder": fit, "apply": {"loaded": 1},
            "status": self.status, "take": {"staging": self.staging},
        }  # fmt: skip
        return [answers.get(method, "")]

    async def pause(self, policy: str) -> None:
        self.calls.append(f"pause {policy}")
        if self.is_stuck:
            await asyncio.sleep(3600)

    async def resume(self) -> None:
        self.calls.append("resume")

    async def keep_keys(self) -> None:
        self.calls.append("keep keys")

    async def clear_caches(self) -> None:
        self.calls.append("clear")
        await self.may_clear.wait()
        if self.has_stuck_caches:
            raise WeightUpdateFailed("staged: the cache is in use")

    async def progress(self) -> dict[str, dict[int, int]]:
        return {}


class Worker:
    """A worker's weight control, with the errors it reported."""

    def __init__(self, run_dir: str = "", root: str = "", *, timeout_s: float = TIMEOUT_S) -> None:
        config = ServerConfig(run_dir=run_dir, weights_root=root, weight_update_timeout_s=timeout_s)
        self.engine = RecordingEngine()
        self.broken: list[str] = []
        self.num_changes = 0
        self.control = Control(
            self.engine, config, worker_id="0",  # type: ignore[arg-type]
            on_changed=self._on_changed, on_broken=self.broken.append,
            front_ends=FrontEndQueues(lambda question: ()),
        )  # fmt: skip

    def _on_changed(self) -> None:
        self.num_changes += 1

    async def ask(self, action: Action) -> CommandDone:
        return await self.control.answer(Command("i", 1, action))

    async def good(self, action: Action) -> dict[str, Any]:
        done = await self.ask(action)
        assert done.code == "", done.message
        return done.result

    async def begin(self) -> None:
        await self.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2))
        await self.good(AwaitStep("join", "s"))
        await self.good(announcement("u", 7))

    async def state(self) -> str:
        return str((await self.good(GetStatus()))["state"])


def run(story: Callable[[Worker], Awaitable[None]], worker: Worker | None = None) -> Worker:
    """Runs `story` with a ready worker whose watch and pool tasks run."""
    worker = worker or Worker()

    async def run_story() -> None:
        await worker.control.start("m")
        tasks = [
            asyncio.create_task(work())
            for work in (worker.control.watch, worker.control.follow_pool)
        ]
        await asyncio.wait_for(story(worker), 20)
        for task in tasks:
            task.cancel()

    asyncio.run(run_story())
    return worker


def pool_state(weights: PoolWeights, pause: PoolPause | None = None) -> PoolState:
    return PoolState(model="m", weights=weights, pause=pause or PoolPause())
