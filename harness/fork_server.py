"""Servers and workers as forks of one process that has imported their modules.

Importing what `titopool serve` and `python -m harness.stub_worker` need takes seconds of a core, and vLLM
several more; a fork of a process that has it takes 20 ms. What runs afterwards is the same code, with
the same settings (`harness/forked_modules.py`). `python -m harness.fork_server FD` is that process: it reads
jobs from a socket, and ends, with all that it has started, as soon as the test process has closed the
socket.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from harness.forked_modules import import_engine, run_module

# Seconds to import the modules, and for what was killed to end, on a busy machine.
START_TIMEOUT_S, END_TIMEOUT_S = 120.0, 30.0
MAX_MESSAGE = 2**20
MODULES = (
    "app", "gunicorn.app.wsgiapp", "titopool.commands.serve", "workers.supervisor.supervisor",
    "harness.stub_worker",
)  # fmt: skip


class Forked:
    """A fork, with what tests use of `subprocess.Popen`."""

    def __init__(
        self, pid: int, status: socket.socket, args: Sequence[str], parent: subprocess.Popen[bytes]
    ):
        self.pid, self.args, self._parent = pid, list(args), parent
        self.returncode: int | None = None
        self._status = status

    def __del__(self) -> None:
        self._status.close()

    def poll(self) -> int | None:
        with suppress(TimeoutError, subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative: the signal that ended the process.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            code = self._status.recv(16)
            assert code, (
                f"the process that forks servers has ended with code {self._parent.poll()} "
                f"(fork {self.pid}, which {'lives' if psutil.pid_exists(self.pid) else 'ended'}); "
                "its log is above"
            )
            self.returncode = int(code)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def descendants(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def kill_group(self, within_s: float = END_TIMEOUT_S) -> None:
        """Kills the process and its children.

        Raises:
            AssertionError: a child in a session of its own was left, or one does not end; it is named.
        """
        if self.returncode is not None and psutil.pid_exists(self.pid):
            # Another process has its number, so its group has ended, too.
            return
        left = self.descendants()
        # The group outlives its first process.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # `psutil.wait_procs` would wait for zombies, too.
        deadline = time.monotonic() + within_s
        while (left := alive(left)) and time.monotonic() < deadline:
            time.sleep(0.01)
        named = [f"{one.pid} {one.cmdline()}" for one in left]
        for one in left:
            one.kill()
        self.wait(END_TIMEOUT_S)
        assert not named, f"processes outlived {self.args}: {named}"


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run.

    Zombies do not count: some machines' first process reaps them only every other second.
    """
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class ForkServer:
    """Starts processes as forks; itself started with the first, and again after it has died."""

    def __init__(self, *, with_engine: bool = False):
        """`with_engine`: the process has imported vLLM too, so that real workers are forks as well."""
        self._with_engine = with_engine
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        atexit.register(self.end)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environ: Mapping[str, str],
        folder: Path,
        output: int | None = None,
        num_descriptors: int | None = None,
    ) -> Forked:
        """Starts `python -m module arguments` as a fork.

        Args:
            output: the descriptor for stdout and stderr; None: those of this process.
            num_descriptors: soft and hard limit of open files.
        """
        if self._process is not None and (code := self._process.poll()) is not None:
            # Tests whose servers ended with it have failed. This one begins clean.
            # The suite lists it at its end; one of this package would be an error.
            text = f"the process that forks servers had ended with code {code}"
            warnings.warn_explicit(text, RuntimeWarning, "fork server", 1)
            self.end()
        if self._socket is None:
            self._begin()
        assert self._socket is not None
        assert self._process is not None
        job = {
            "module": module, "arguments": list(arguments), "environ": dict(environ),
            "folder": str(folder), "num_descriptors": num_descriptors,
        }  # fmt: skip
        ours, its = socket.socketpair()
        try:
            with its:
                files = [its.fileno(), 2 if output is None else output]
                socket.send_fds(self._socket, [json.dumps(job).encode()], files)
            self._socket.settimeout(START_TIMEOUT_S)
            pid = self._socket.recv(16)
            assert pid, "the process that forks servers has ended; its log is above"
        except BaseException:
            ours.close()
            # The next test begins with a new one.
            self.end()
            raise
        return Forked(int(pid), ours, [module, *arguments], self._process)

    def _begin(self) -> None:
        # Only here: `harness.servers` imports this module.
        from harness.servers import REPOSITORY, environment

        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A message holds an environment.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.fork_server", str(its.fileno()), *["engine"] * self._with_engine],
                env=environment(), cwd=REPOSITORY, pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def end(self) -> None:
        """Ends the process; it kills its forks."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait(30)
            self._process = None


fork_server = ForkServer()
engine_fork_server = ForkServer(with_engine=True)


# ---- the process ---------------------------------------------------------------------


class _Parent:
    """Forks for each job, and says how each fork has ended."""

    def __init__(self, jobs: socket.socket):
        self._jobs = jobs
        # By pid: where the exit code goes.
        self._status: dict[int, socket.socket] = {}
        self._woken, wake = socket.socketpair()
        for one in (self._woken, wake):
            one.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._jobs, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                        self._reap()
                    else:
                        message, files, *_ = socket.recv_fds(self._jobs, MAX_MESSAGE, 2)
                        if not message:
                            return self._kill_all()
                        self._fork(json.loads(message), *files)

    def _fork(self, job: dict[str, Any], status: int, output: int) -> None:
        pid = os.fork()
        if pid == 0:
            run_module(
                job["module"], job["arguments"], job["environ"],
                lambda: self._leave(status, output, job["folder"], job["num_descriptors"]),
            )  # fmt: skip
        # Here too: the test may kill the group before the fork runs.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        os.close(output)
        # A descriptor that arrives over a socket would outlive exec.
        os.set_inheritable(status, False)
        self._status[pid] = socket.socket(fileno=status)
        self._jobs.send(str(pid).encode())

    def _leave(self, status: int, output: int, folder: str, num_descriptors: int | None) -> None:
        """Drops in a fork what is the parent's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self._jobs, self._woken, self._wake, *self._status.values()):
            one.close()
        os.close(status)
        os.setpgid(0, 0)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        os.chdir(folder)
        if num_descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors, num_descriptors))

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if (status := self._status.pop(found[0], None)) is None:
                    # Of a package that was imported, e.g. multiprocessing's tracker.
                    continue
                with status, suppress(OSError):
                    status.send(str(os.waitstatus_to_exitcode(found[1])).encode())

    def _kill_all(self) -> None:
        for pid in self._status:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def main() -> None:
    if "engine" in sys.argv:
        # Before Flask: see `WITH_PROXIES`.
        import_engine()
    for name in MODULES:
        importlib.import_module(name)
    # Else each fork's first collection would copy the memory of all imported objects.
    gc.freeze()
    _Parent(socket.socket(fileno=int(sys.argv[1]))).run()
    # As its forks: without the interpreter's end, at which libraries of vLLM write what they leaked.
    os._exit(0)


if __name__ == "__main__":
    main()
