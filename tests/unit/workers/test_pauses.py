"""Generation resumes even if the step or the call that resumes it is cancelled."""

import asyncio
from typing import Any

from tests.kit.workers.recording_engine import Worker
from titopool.wire.commands import AwaitStep, EndTensors, JoinGroup, Pause, Resume


class SlowEngine:
    """Pauses and resumes with a delay; a call cancelled during the delay has no effect."""

    is_paused = False

    async def pause(self, policy: str) -> None:
        await asyncio.sleep(0.02)
        self.is_paused = True

    async def resume(self) -> None:
        await asyncio.sleep(0.02)
        self.is_paused = False


def worker_of(engine: SlowEngine) -> Worker:
    worker = Worker()
    for name in ("pause", "resume"):
        setattr(worker.engine, name, getattr(engine, name))
    return worker


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def join(session: str) -> JoinGroup:
    # Both trainers are on one device, so the second replaces the first at once.
    return JoinGroup(session, "trl", "gloo", "127.0.0.1", 1, 0, 2, device_uuid="GPU-1")


def test_generation_resumes_when_a_step_is_ended_while_it_resumes():
    async def scenario() -> None:
        engine = SlowEngine()
        worker = worker_of(engine)
        await worker.control.start("m")
        await worker.good(join("one"))
        await worker.good(AwaitStep("join", "one"))
        # Pauses generation, clears the caches and resumes generation.
        await worker.good(EndTensors(is_last_call=True))
        await until(lambda: engine.is_paused)
        await until(lambda: not worker.control._pauses.is_committing)
        assert engine.is_paused
        # A new join ends the running steps.
        await worker.good(join("two"))
        await until(lambda: not engine.is_paused)

    asyncio.run(scenario())


def test_generation_resumes_when_the_resume_call_is_cancelled():
    async def scenario() -> None:
        engine = SlowEngine()
        worker = worker_of(engine)
        await worker.control.start("m")
        await worker.good(Pause("keep", 60))
        assert engine.is_paused
        call = asyncio.ensure_future(worker.ask(Resume()))
        await asyncio.sleep(0.005)
        call.cancel()
        await until(lambda: not engine.is_paused)

    asyncio.run(scenario())
