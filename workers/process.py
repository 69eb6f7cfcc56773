"""A worker process's threads and children: what must not keep it, or outlive it; its collector."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil

Result = TypeVar("Result")

# Exit codes of a worker; whoever started it starts it again after all but the first.
EXIT_STOPPED, EXIT_FAILED = 0, 1
# Nobody knows which weights the model has: a new process loads its own, and those of the pool.
EXIT_WEIGHTS_UNKNOWN = 75


async def in_daemon_thread(call: Callable[[], Result]) -> Result:
    """Runs `call` in a thread that does not keep the process when it must end meanwhile."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, done.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await done


def kill_children() -> None:
    """Kills every process below this one: vLLM leaves its own behind."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass


@contextmanager
def without_collector() -> Iterator[None]:
    """For imports: vLLM's take 5 s instead of 7, as nothing that they make is ever garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
