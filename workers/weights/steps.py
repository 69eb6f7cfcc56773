"""Steps of weight updates that run as tasks: a command starts a step, another awaits the result."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from titopool.errors import Conflict

Result = dict[str, Any]
# Finished steps whose result is kept for later `wait` calls.
MAX_STEPS = 32


class Steps:
    """Tasks, each named by its step and by its subject (a session or an update)."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[Result]] = {}

    def start(self, step: str, of: str, work: Coroutine[Any, Any, Result]) -> None:
        """Runs `work` as a task."""
        task = asyncio.get_running_loop().create_task(work)
        # Retrieve the exception, so that asyncio does not warn when nobody awaits the task.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # Removed first, so that a repeated step becomes the newest in the dict's order.
        self._tasks.pop((step, of), None)
        self._tasks[step, of] = task
        ended = [name for name, one in self._tasks.items() if one.done()]
        for name in ended[: max(0, len(self._tasks) - MAX_STEPS)]:
            del self._tasks[name]

    def has_started(self, step: str, of: str) -> bool:
        """Whether the step runs or has ended."""
        return (step, of) in self._tasks

    def is_running(self, step: str, of: str) -> bool:
        """Whether the step runs."""
        task = self._tasks.get((step, of))
        return task is not None and not task.done()

    @property
    def is_any_running(self) -> bool:
        """Whether any step runs."""
        return any(not task.done() for task in self._tasks.values())

    async def wait(self, step: str, of: str) -> Result:
        """Returns the step's result or raises the step's error.

        Raises:
            Conflict: the step never started, its result is no longer kept, or it was cancelled.
        """
        task = self._tasks.get((step, of))
        if task is None:
            raise Conflict(f"{step}: no such step for {of} (never started, or expired)")
        # Cancelling this call must not cancel the step.
        await asyncio.wait([task])
        if task.cancelled():
            raise Conflict(f"{step}: the step for {of} was cancelled; ask /weights for the state")
        return task.result()

    def cancel(self) -> None:
        """Cancels all running steps except the one that calls."""
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
