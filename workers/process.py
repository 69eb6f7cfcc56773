"""What concerns a worker's whole process: exit codes, daemon threads, child processes."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psutil

Result = TypeVar("Result")

# Exit codes of a worker. The supervisor or a service manager restarts it after all but the first.
EXIT_STOPPED, EXIT_FAILED = 0, 1
# The model's weights are in an unknown state. A new process loads the initial weights, then the
# pool's.
EXIT_WEIGHTS_UNKNOWN = 75


async def in_daemon_thread(call: Callable[[], Result]) -> Result:
    """Runs `call` in a daemon thread, which does not keep the process from exiting."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        # The caller may have been cancelled.
        if not done.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            loop.call_soon_threadsafe(finish, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(finish, done.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await done


def kill_children() -> None:
    """Kills all descendants of this process: vLLM does not always end its processes."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
