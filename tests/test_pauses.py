"""Who holds generation: whatever is cancelled amid a pause or its end, it goes on afterwards."""

import asyncio
from typing import Any

from tests.test_weight_control import Worker
from titopool.wire.commands import AwaitStep, FinishTensors, JoinGroup, Pause, Resume


class SlowEngine:
    """Takes a while to stop and to go on; a call that is given up before has done nothing."""

    stands = False

    async def pause(self, policy: str) -> None:
        await asyncio.sleep(0.02)
        self.stands = True

    async def resume(self) -> None:
        await asyncio.sleep(0.02)
        self.stands = False


def worker_of(engine: SlowEngine) -> Worker:
    worker = Worker()
    for name in ("pause", "resume"):
        setattr(worker.engine, name, getattr(engine, name))
    return worker


async def until(holds: Any) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


def join(session: str) -> JoinGroup:
    # Of one device: the second takes the first one's place at once.
    return JoinGroup(session, "trl", "gloo", "127.0.0.1", 1, 0, 2, device_uuid="GPU-1")


def test_generation_goes_on_when_a_step_is_ended_while_it_lets_it_go_on():
    async def story() -> None:
        engine = SlowEngine()
        worker = worker_of(engine)
        await worker.control.start("m")
        await worker.good(join("one"))
        await worker.good(AwaitStep("join", "one"))
        # Stops generation, clears the caches and lets it go on.
        await worker.good(FinishTensors())
        await until(lambda: engine.stands)
        await until(lambda: not worker.control._pauses.is_committing)
        assert engine.stands
        # Ends the steps that are running.
        await worker.good(join("two"))
        await until(lambda: not engine.stands)

    asyncio.run(story())


def test_generation_goes_on_when_the_lease_is_ended_by_a_call_that_is_given_up():
    async def story() -> None:
        engine = SlowEngine()
        worker = worker_of(engine)
        await worker.control.start("m")
        await worker.good(Pause("keep", 60))
        assert engine.stands
        call = asyncio.ensure_future(worker.ask(Resume()))
        await asyncio.sleep(0.005)
        call.cancel()
        await until(lambda: not engine.stands)

    asyncio.run(story())
