"""Calls to the processes that hold the model, each with a deadline."""

import asyncio
from collections.abc import Callable
from typing import Any

from titopool.errors import WeightUpdateFailed
from workers.engine.weights import EngineBroken, WeightEngine

# Between two looks at how far the receiver is, at first and at most.
FIRST_POLL_S = 0.0005
LONGEST_POLL_S = 0.05


class Calls:
    """What a `WeightEngine` is asked; `await calls("method", …)`."""

    def __init__(
        self, engine: Callable[[], WeightEngine], timeout_s: float, on_broken: Callable[[str], None]
    ):
        """`on_broken` gets the reason when a process can take no more updates."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._on_broken = on_broken
        self.num_active = 0

    async def __call__(self, method: str, *args: Any) -> list[Any]:
        """What each process answers; raises as `WeightEngine.call`, and TimeoutError."""
        self.num_active += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._engine().call(method, *args)
        except EngineBroken as error:
            self._on_broken(str(error))
            raise WeightUpdateFailed(f"{error}; the worker starts again") from error
        finally:
            self.num_active -= 1

    async def receiving(self) -> list[dict[str, Any]]:
        """How far the receiver of each process is.

        Raises:
            WeightUpdateFailed: one has none, or it failed.
        """
        statuses = await self("status")
        for status in statuses:
            if status is None or status["error"]:
                reason = "it is gone" if status is None else status["error"]
                raise WeightUpdateFailed(f"the group failed: {reason}")
        return statuses

    async def poll(self, is_there: Callable[[dict[str, Any]], bool]) -> None:
        """Waits until `is_there` of all processes' receivers."""
        pause_s = FIRST_POLL_S
        while not all(is_there(status) for status in await self.receiving()):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
