"""Long parts of commands: each runs as a task, and whoever asks later hears of its end."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from titopool.errors import Conflict

Result = dict[str, Any]
# Ends that are kept for those who ask.
MAX_STEPS = 32


class Steps:
    """The tasks by name and by what they are for."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[Result]] = {}

    def start(self, step: str, of: str, work: Coroutine[Any, Any, Result]) -> None:
        """Runs `work` as the step of that name."""
        task = asyncio.get_running_loop().create_task(work)
        # Its error is for those who wait; that nobody does is no fault.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._tasks[step, of] = task
        while len(self._tasks) > MAX_STEPS:
            self._tasks.pop(next(iter(self._tasks)))

    def is_running(self, step: str, of: str) -> bool:
        """Whether that step has not ended."""
        task = self._tasks.get((step, of))
        return task is not None and not task.done()

    async def wait(self, step: str, of: str) -> Result:
        """What came of the step; its error is raised.

        Raises:
            Conflict: there is no such step, or it was ended by something else.
        """
        task = self._tasks.get((step, of))
        if task is None:
            raise Conflict(f"{step}: expected one that was begun, got {of}")
        # Whoever waits may leave; the step goes on.
        await asyncio.wait([task])
        if task.cancelled():
            raise Conflict(f"{step}: {of} was ended meanwhile; ask /weights for the state")
        return task.result()

    def cancel(self) -> None:
        """Ends all parts of updates that run, except the one that calls."""
        for (step, _), task in self._tasks.items():
            if step != "pause" and task is not asyncio.current_task():
                task.cancel()
