"""`python -m workers.template FD …`: imports vLLM once, and forks workers, which share its memory.

Runs in: a child of the supervisor (`workers/supervisor/forking.py`), in one thread, without a socket but
FD and without a key. Ends when the supervisor closes its side of FD, so with the supervisor.

A message has the worker's words and variables (`Fork`), and brings the descriptors of its output and of
its status. Two forks stand between the template and a worker: the first ends at once, so that the
supervisor, which has made itself a subreaper (prctl(2)), becomes the worker's parent. The worker answers
with its pid.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Set
from contextlib import suppress
from typing import NoReturn

import msgspec
from setproctitle import getproctitle, setproctitle

from titopool.deadline import Deadline
from titopool.helpers.fork_server import PR_SET_PDEATHSIG, drop_descriptors
from titopool.settings.config import ServerConfig
from titopool.settings.gpus import visible_gpus
from titopool.settings.sources import from_environment
from workers import __main__ as worker
from workers.engine.start.importing import import_vllm, kinds_of_gpus
from workers.supervisor.forking import ADOPTED_S, MAX_MESSAGE, NO_FORK, READY, Fork

# What NVML leaves open, and goes on with in forks.
OF_NVML = ("/dev/nvidia", "anon_inode:[eventfd]", "pipe:")


def main() -> None:
    """Forks workers until the supervisor has ended."""
    # A supervisor that is killed while vLLM is imported closes nothing that would be read here.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # It finds the title's memory by the variables, which a worker replaces.
    getproctitle()
    control = socket.socket(fileno=int(sys.argv[1]))
    environ, before = dict(os.environ), _descriptors().keys()
    if reason := _import(from_environment(), before):
        control.send(reason.encode())
        return
    kept = _descriptors().keys() - before
    # Else each worker's first collection would copy the memory of all imported objects.
    gc.collect()
    gc.freeze()
    control.send(READY)
    while True:
        message, descriptors, *_ = socket.recv_fds(control, MAX_MESSAGE, 2)
        if not message:
            return
        pid = _fork(control)
        if pid == 0:
            if _fork(control):
                os._exit(0)
            # Without what vLLM's import has set: a new process begins with the user's variables.
            fork = msgspec.msgpack.decode(message, type=Fork)
            _become(control, fork, environ, kept, *descriptors)
        if pid > 0:
            os.waitpid(pid, 0)
        for one in descriptors:
            os.close(one)


def _import(config: ServerConfig, before: Set[int]) -> str:
    """Imports vLLM; returns why this process cannot be forked then, or "".

    Args:
        before: the descriptors that were open.
    """
    on_cpu = not visible_gpus()
    try:
        import_vllm(config, on_cpu=on_cpu)
        kinds = set() if on_cpu else kinds_of_gpus()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if threading.active_count() > 1:
        # A lock that another thread holds would stay locked in a fork.
        return f"vLLM's import has left threads: {threading.enumerate()}"
    if len(kinds) > 1:
        # vLLM's import reads what its first GPU can do, and keeps it.
        return f"the GPUs are of several kinds: {', '.join(sorted(kinds))}"
    opened = {file for number, file in _descriptors().items() if number not in before}
    if foreign := [one for one in opened if on_cpu or not one.startswith(OF_NVML)]:
        return f"vLLM's import has left open: {', '.join(foreign)}"
    return "" if on_cpu or _can_use_gpus() else "NVML or CUDA does not begin in a fork of it"


def _can_use_gpus() -> bool:
    """Whether NVML and CUDA begin in a fork: CUDA does not where this process has begun it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # A fork does not inherit this signal, and must not outlive the template in a call that hangs.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            kinds_of_gpus()
            code = ctypes.CDLL("libcuda.so.1").cuInit(0) and 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _descriptors() -> dict[int, str]:
    """The file of each descriptor, but for the one with which they are listed."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _fork(control: socket.socket) -> int:
    """As `os.fork`; -1: there is no memory or process for it, and the supervisor knows."""
    try:
        return os.fork()
    except OSError:
        control.send(NO_FORK)
        return -1


def _become(
    control: socket.socket,
    fork: Fork,
    environ: dict[str, str],
    kept: Set[int],
    output: int,
    status: int,
) -> NoReturn:
    """Becomes what `python -m workers …` is, with the descriptors in `kept`."""
    code = 1
    try:
        # A new process group: killing the group also kills vLLM's processes.
        os.setsid()
        deadline = Deadline.after(ADOPTED_S)
        while os.getppid() != fork.parent_pid:
            if deadline.has_passed:
                os._exit(1)
            time.sleep(0.001)
        if fork.cores:
            # Before there are threads, which inherit it. The supervisor warns if it cannot be set.
            with suppress(OSError):
                os.sched_setaffinity(0, fork.cores)
        control.send(str(os.getpid()).encode())
        for target in (1, 2):
            os.dup2(output, target)
        drop_descriptors({status, *kept})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environ | fork.variables)
        words = [*fork.words, "--status-fd", str(status)]
        setproctitle(" ".join([sys.executable, "-m", "workers", *words]))
        sys.argv = [worker.__file__, *words]
        worker.run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
    # Without the interpreter's end, which visits all imported objects.
    os._exit(0)
