"""What a fork of a worker does not share with it: signals, connections, and the pipe of its reports.

Forks are vLLM's engine process on CPUs (`workers/engine/vllm.py`), and the fork servers of helpers
(`titopool/helpers/`). Python runs the functions of `part_forks` in the child before anything else.
"""

import os
import signal
import socket
import stat
from collections.abc import Callable
from contextlib import suppress


def part_forks(let_go_of_reports: Callable[[], None]) -> None:
    """Makes the later forks of this process let go of what is the worker's.

    Args:
        let_go_of_reports: called in the child.
    """

    def part() -> None:
        _part_signals()
        _part_sockets()
        let_go_of_reports()

    os.register_at_fork(after_in_child=part)


def _part_signals() -> None:
    # Before Python 3.12, asyncio leaves its descriptor to a fork: a signal to the child would call
    # the worker's handler in the worker.
    signal.set_wakeup_fd(-1)
    # As in a process that is spawned.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _part_sockets() -> None:
    """Closes the sockets that have an address: those that listen, and connections.

    Else they outlive a worker that is killed. Pairs without an address may be the child's.
    """
    # In place: an object of this process may still own the number, and close it later.
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if _has_address(descriptor):
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _has_address(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as same:
        # Of other families, e.g. netlink, nobody waits for the end.
        is_known = same.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
        return is_known and bool(same.getsockname() or same.getpeername())
