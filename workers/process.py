"""What concerns a worker's whole process: exit codes, daemon threads, child processes, stacks."""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import psutil

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Exit codes of a worker. The supervisor or a service manager restarts it after all but the first.
EXIT_STOPPED, EXIT_FAILED = 0, 1
# The model's weights are in an unknown state. A new process loads the initial weights, then the
# pool's.
EXIT_WEIGHTS_UNKNOWN = 75
# Its event loop stood for longer than `worker_hang_timeout_s`.
EXIT_HUNG = 70
# With this signal a process writes the stacks of its threads to standard error, whatever they do.
STACKS_SIGNAL = signal.SIGUSR1
# From the decision to end a process that hangs to its end, at most.
END_TIMEOUT_S = 5.0


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


def write_stacks_on_signal() -> None:
    """Lets this process answer `STACKS_SIGNAL`; the handler is C code and waits for no lock."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def end_hung(reason: str, thread_id: int) -> NoReturn:
    """Logs where the thread of the event loop stands, and ends this process and its descendants."""
    # The last resort, for what waits below: it ends the process with the exit code 1.
    faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)
    stack = "".join(traceback.format_stack(sys._current_frames()[thread_id])).rstrip()
    record = logger.makeRecord(
        logger.name, logging.CRITICAL, __file__, 0, "%s; the worker ends. The loop stands in:",
        (reason,), None, sinfo=stack,
    )  # fmt: skip
    log = threading.Thread(target=logger.handle, args=(record,), daemon=True)
    log.start()
    log.join(END_TIMEOUT_S / 2)
    if log.is_alive():
        # The loop holds a lock that logging waits for.
        faulthandler.dump_traceback()
    kill_children()
    os._exit(EXIT_HUNG)
