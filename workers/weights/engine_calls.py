"""Calls to vLLM's processes during a weight update, each with a timeout."""

import asyncio
from collections.abc import Callable
from typing import Any

from titopool.errors import WeightUpdateFailed
from workers.engine.weights import EngineBroken, WeightEngine
from workers.weights.awaited import Awaited

# The pause between two polls of the receivers: it doubles from the first to the last value.
FIRST_POLL_S = 0.0005
MAX_POLL_S = 0.05


class EngineCalls:
    """Calls methods of a `WeightEngine`: `await call("method", …)`."""

    def __init__(
        self, engine: Callable[[], WeightEngine], timeout_s: float, on_broken: Callable[[str], None]
    ):
        """`on_broken` gets the reason when a vLLM process can take no more updates."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._on_broken = on_broken
        self.num_in_flight = 0
        # What the receivers waited for when they were last asked.
        self.awaited = Awaited()

    async def __call__(self, method: str, *args: Any) -> list[Any]:
        """The answer of each vLLM process.

        Raises:
            TimeoutError: not all processes have answered in time.
            InvalidRequest, WeightUpdateFailed: as `WeightEngine.call` does.
        """
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._engine().call(method, *args)
        except EngineBroken as error:
            self._on_broken(str(error))
            raise WeightUpdateFailed(f"{error}; the worker restarts") from error
        finally:
            self.num_in_flight -= 1

    async def receiver_statuses(self) -> list[dict[str, Any]]:
        """The progress of each vLLM process's receiver (`workers/in_model/receiving/receiver.py`).

        Raises:
            WeightUpdateFailed: a receiver failed, or a process has no receiver.
        """
        statuses = await self("status")
        for status in statuses:
            if status is None or status["error"]:
                reason = status["error"] if status else "a process has no receiver"
                raise WeightUpdateFailed(f"the group failed: {reason}{self.awaited.reason}")
        self.awaited.observe([one["awaited"] for one in statuses if one["awaited"]])
        return statuses

    async def wait_for_receivers(self, is_done: Callable[[dict[str, Any]], bool]) -> None:
        """Polls until `is_done(status)` holds for every receiver; raises as `receiver_statuses`."""
        pause_s = FIRST_POLL_S
        while not all(is_done(status) for status in await self.receiver_statuses()):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)
