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
        # Retrieve the exception, so that asyncio does not warn when nobody awaits the task.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # A step of the same name has ended; this one is the latest, also in the order below.
        self._tasks.pop((step, of), None)
        self._tasks[step, of] = task
        ended = [name for name, one in self._tasks.items() if one.done()]
        for name in ended[: max(0, len(self._tasks) - MAX_STEPS)]:
            del self._tasks[name]

    def is_known(self, step: str, of: str) -> bool:
        """Whether that step has begun."""
        return (step, of) in self._tasks

    @property
    def is_busy(self) -> bool:
        """Whether any part of an update is running."""
        return any(step != "pause" and not task.done() for (step, _), task in self._tasks.items())

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
