"""Workers as forks of a process that has imported vLLM: a start takes a fraction of a new interpreter's.

Owns: the template process (`workers/template.py`). It is started with the supervisor, and again when it
was killed or did not fork. When it cannot import vLLM or fork, after `MAX_FAILURES` in a row, and where a
fork would not be what a new interpreter is (`reason_for_new_interpreters`), each worker is started as
`python -m workers`.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import msgspec

from titopool.deadline import Deadline
from titopool.settings.config import SECRET_VARIABLES

# Not __name__, in which `supervisor` comes twice.
logger = logging.getLogger("workers.supervisor")

READY = b"ready"
# A message holds a worker's words and variables.
MAX_MESSAGE = 2**20
# What the template answers when the system has no memory or process for a fork.
NO_FORK = b"0"
# Seconds for a fork to become a child of the supervisor, for its pid to come, and for the template's end.
ADOPTED_S, FORK_TIMEOUT_S, END_TIMEOUT_S = 2.0, 5.0, 1.0
# Of forks, in a row.
MAX_FAILURES = 2
# What torch, libgomp, oneDNN and vLLM read as they are loaded. vLLM reads VLLM_PORT when it needs a port.
READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "TORCH", "VLLM_", "LD_PRELOAD")
READ_LATER = {"VLLM_PORT"}
# With these, libgomp binds the thread that loads it, and chooses places for others, at its import.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


class Fork(msgspec.Struct):
    """What the template needs to fork a worker, besides the descriptors of its output and status."""

    # After `python -m workers`.
    words: list[str]
    # That the template does not have.
    variables: dict[str, str]
    parent_pid: int
    # Empty: any core.
    cores: list[int]


class ForkedWorker:
    """A worker that the template has forked: a child, with what the supervisor uses of `Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes]):
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def reason_for_new_interpreters(
    environ: Mapping[str, str], *, has_own_command: bool, is_one_of_a_pool: bool
) -> str:
    """Why workers cannot be forks; "": they can."""
    if has_own_command:
        return "worker_command is set"
    if is_one_of_a_pool:
        return "it is one of a pool on several hosts"
    if binding := [name for name in BINDING if name in environ]:
        return f"{binding[0]} is set, and binds the thread that imports torch"
    try:
        with _subreaper():
            return ""
    except OSError as error:
        return str(error)


class Template:
    """The process that workers are forks of."""

    def __init__(self, environ: Mapping[str, str], timeout_s: float):
        """
        Args:
            environ: of the workers; keys are left out.
            timeout_s: for the import of vLLM.
        """
        self._environ = {k: v for k, v in environ.items() if k not in SECRET_VARIABLES}
        self._timeout_s = timeout_s
        self._num_failures = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = Deadline.after(0)
        self._is_ready = False
        self._start()

    @property
    def is_importing(self) -> bool:
        """Whether it will be ready to fork, but is not yet."""
        return self._process is not None and not self._is_ready

    def forks(self, variables: Mapping[str, str]) -> bool:
        """Whether a worker with these variables can be a fork, now."""
        differing = [
            name
            for name, value in variables.items()
            if name.startswith(READ_AT_IMPORT)
            and name not in READ_LATER
            and self._environ.get(name) != value
        ]
        if differing:
            logger.info("a worker starts a new interpreter: %s differ", ", ".join(differing))
        return self._is_ready and not differing

    def follow(self) -> None:
        """Notes whether the process is ready; starts it again if it was killed."""
        if self._process is None:
            return
        reason = ""
        if not self._is_ready:
            with suppress(OSError):
                answer = self._control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
                self._is_ready = answer == READY
                reason = "" if self._is_ready else answer.decode(errors="replace")
        code = self._process.poll()
        if reason or (code or 0) > 0:
            # It would fail again.
            self._give_up(reason or f"it exited with code {code}")
        elif code is not None:
            self._begin_again(f"it ended with code {code}")
        elif not self._is_ready and self._deadline.has_passed:
            self._give_up(f"not ready after {self._timeout_s:g} s (worker_start_timeout_s)")

    def fork(
        self, words: Sequence[str], variables: Mapping[str, str], cores: Iterable[int], status: int
    ) -> ForkedWorker | None:
        """A new worker, a child of this process; None: there is none, and none will come.

        Args:
            words: after `python -m workers`, without `--status-fd`.
            cores: that it may run on; empty: any.
            status: the descriptor of its reports, a copy of which it gets.
        """
        fork = Fork(list(words), dict(variables), os.getpid(), list(cores))
        output, its_output = os.pipe()
        try:
            with _subreaper():
                message = msgspec.msgpack.encode(fork)
                socket.send_fds(self._control, [message], [its_output, status])
                self._control.settimeout(FORK_TIMEOUT_S)
                if not (answer := self._control.recv(16)):
                    raise ConnectionResetError("it has ended")
        except OSError as error:
            os.close(output)
            self._begin_again(f"no fork: {error}")
            return None
        finally:
            os.close(its_output)
        self._num_failures = 0
        if answer == NO_FORK:
            os.close(output)
            logger.warning("a worker starts a new interpreter: no memory or process for a fork")
            return None
        return ForkedWorker(int(answer), os.fdopen(output, "rb", buffering=0))

    def close(self) -> None:
        """Ends the process; workers go on, but for one whose pid was not waited for."""
        process, self._process, self._is_ready = self._process, None, False
        if process is None:
            return
        with self._control, suppress(OSError, ValueError):
            # From here on a fork that is late cannot answer, and ends.
            self._control.shutdown(socket.SHUT_RDWR)
            if pid := int(self._control.recv(16, socket.MSG_DONTWAIT)):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        process.kill()
        # Not for ever: it may read a file of a host that is gone.
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)

    def _start(self) -> None:
        self._deadline = Deadline.after(self._timeout_s)
        try:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "workers.template", str(theirs.fileno())],
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    # It says itself why it cannot fork. A new interpreter has the details.
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C is for the supervisor.
                    start_new_session=True,
                )
        except OSError as error:
            self._give_up(str(error))

    def _begin_again(self, why: str) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._give_up(why)
            return
        logger.warning("the process that forks workers is started again: %s", why)
        self.close()
        self._start()

    def _give_up(self, why: str) -> None:
        self.close()
        logger.warning("from here on each worker starts a new interpreter: %s", why)


@contextmanager
def _subreaper() -> Iterator[None]:
    """Within the block, this process adopts the orphans of its descendants.

    Raises:
        OSError: the system refuses it.
    """
    prctl = ctypes.CDLL(None).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system lets no process adopt orphans")
    try:
        yield
    finally:
        # Those of vLLM are the init process's to reap.
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
