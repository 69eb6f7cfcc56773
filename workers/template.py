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
from typing import NoReturn

import msgspec
from setproctitle import getproctitle, setproctitle

from titopool.deadline import Deadline
from titopool.helpers.fork_server import PR_SET_PDEATHSIG, drop_descriptors
from titopool.settings.sources import from_environment
from workers import __main__ as worker
from workers.engine.start.importing import import_vllm
from workers.supervisor.forking import ADOPTED_S, MAX_MESSAGE, READY, Fork


def main() -> None:
    """Forks workers until the supervisor has ended."""
    # A supervisor that is killed while vLLM is imported closes nothing that would be read here.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # It finds the title's memory by the variables, which a worker replaces.
    getproctitle()
    control = socket.socket(fileno=int(sys.argv[1]))
    environ = dict(os.environ)
    import_vllm(from_environment(), on_cpu=True)
    if threading.active_count() > 1:
        # A lock that another thread holds would stay locked in a fork.
        sys.exit(f"vLLM's import has left threads: {threading.enumerate()}")
    # Else each worker's first collection would copy the memory of all imported objects.
    gc.collect()
    gc.freeze()
    control.send(READY)
    while True:
        message, descriptors, *_ = socket.recv_fds(control, MAX_MESSAGE, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            if os.fork():
                os._exit(0)
            # Without what vLLM's import has set: a new process begins with the user's variables.
            _become(control, msgspec.msgpack.decode(message, type=Fork), environ, *descriptors)
        os.waitpid(pid, 0)
        for one in descriptors:
            os.close(one)


def _become(
    control: socket.socket, fork: Fork, environ: dict[str, str], output: int, status: int
) -> NoReturn:
    """Becomes what `python -m workers …` is."""
    try:
        # A new process group: killing the group also kills vLLM's processes.
        os.setsid()
        deadline = Deadline.after(ADOPTED_S)
        while os.getppid() != fork.parent_pid:
            if deadline.has_passed:
                os._exit(1)
            time.sleep(0.001)
        control.send(str(os.getpid()).encode())
        for target in (1, 2):
            os.dup2(output, target)
        drop_descriptors({status})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environ | fork.variables)
        words = [*fork.words, "--status-fd", str(status)]
        setproctitle(" ".join([sys.executable, "-m", "workers", *words]))
        sys.argv = [worker.__file__, *words]
        worker.run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
    # Without the interpreter's end, which visits all imported objects.
    os._exit(0)
