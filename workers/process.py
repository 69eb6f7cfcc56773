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
# For each step in which a process that hangs ends: it logs where, and then ends its descendants.
END_TIMEOUT_S = 5.0
# Of Python: ends a process that hung, and its descendants.
END_PROGRAM = "from workers import process; process.kill_children(); exit(process.EXIT_HUNG)"


def reason_of(code: int, *, has_loaded: bool) -> str:
    """The class of the end of a worker process.

    Returns:
        "not_started" before it was ready, "killed" by SIGKILL (out of memory, perhaps), "signal",
        "asked" to end, "weights_unknown" after an update that failed half-way, "hung", else
        "failed".
    """
    if not has_loaded:
        return "not_started"
    if code < 0:
        return "killed" if code == -signal.SIGKILL else "signal"
    known = {EXIT_STOPPED: "asked", EXIT_WEIGHTS_UNKNOWN: "weights_unknown", EXIT_HUNG: "hung"}
    return known.get(code, "failed")


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
    # The last resort, for what waits for the loop: it ends the process with the exit code 1.
    faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)
    log = threading.Thread(target=_log_hang, args=(reason, thread_id), daemon=True)
    log.start()
    log.join(END_TIMEOUT_S / 4)
    if log.is_alive():
        # The loop holds a lock that logging waits for, or Python's in one long call after another.
        faulthandler.dump_traceback()
    # This thread would need Python's lock hundreds of times to find the descendants. The same process
    # with a new program has no loop; the timer ends it if that program hangs.
    signal.setitimer(signal.ITIMER_REAL, END_TIMEOUT_S)
    os.execv(sys.executable, [sys.executable, "-P", "-c", END_PROGRAM])


def _log_hang(reason: str, thread_id: int) -> None:
    stack = "".join(traceback.format_stack(sys._current_frames()[thread_id])).rstrip()
    record = logger.makeRecord(
        logger.name, logging.CRITICAL, __file__, 0, "%s; the worker ends. The loop stands in:",
        (reason,), None, sinfo=stack,
    )  # fmt: skip
    logger.handle(record)
