"""The process that helpers are forks of, and what runs in both.

A `ForkServer` is forked once from the owner, when the owner has imported and loaded what the work needs;
its memory is shared. It has one thread, so its forks are safe. What a helper does is its user's function.

A call is a frame each way, over a pair of sockets: eight bytes with the length, then the bytes. An answer
may be a descriptor instead. A helper's first frame has its pid.
"""

import asyncio
import ctypes
import gc
import logging
import os
import resource
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple, NoReturn

from titopool.deadline import Deadline

logger = logging.getLogger(__name__)

# An answer in bytes, or a descriptor: the helper closes its own once it is sent, and the caller of the
# helper closes the one that it gets.
Answer = bytes | int
Work = Callable[[bytes], Answer]

# A killed fork server takes its helpers along; a helper's end may be seen first.
END_S = 0.5
LENGTH = struct.Struct("<Q")
# linux/prctl.h
PR_SET_PDEATHSIG = 1


class Limits(NamedTuple):
    """What ends a helper; 0: no limit."""

    # CPU time of one call.
    cpu_s: float = 0.0
    # Address space of a helper beyond what its fork server has.
    memory_bytes: int = 0
    niceness: int = 0


class ForkServer:
    """The process that helpers are forks of; started again when it has ended."""

    def __init__(self, title: str, prepare: Callable[[], Work], limits: Limits | None = None):
        """
        Args:
            title: the command line that `ps` shows.
            prepare: called once, in the fork server, before the first helper is forked.
        """
        self._title, self._prepare = title, prepare
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._is_closed = False
        # Also its process group; 0: it has ended, and another process may have its number.
        self.pid = 0
        self._start()

    def _start(self) -> None:
        owner = os.pidfd_open(os.getpid())
        try:
            self._control, theirs = socket.socketpair()
            with theirs:
                pid = os.fork()
                # On both sides: whichever is first.
                os.setpgid(pid, 0)
                if pid == 0:
                    fork_helpers(theirs, owner, self._title, self._prepare, self._limits)
        finally:
            os.close(owner)
        self.pid = pid

    def connect(self) -> socket.socket:
        """The socket of a new helper, which does not block.

        Raises:
            ConnectionError: the server is closed.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"h"], [theirs.fileno()])
            except OSError as error:
                if self._is_closed:
                    ours.close()
                    raise ConnectionResetError("the helpers are closed") from error
                logger.warning("%s is started again: %s", self._title, error)
                self._kill()
                self._start()
                socket.send_fds(self._control, [b"h"], [theirs.fileno()])
        ours.setblocking(False)
        return ours

    async def ends(self, pid: int) -> bool:
        """Whether the server that had this pid has ended, or does so at once."""
        deadline = Deadline.after(END_S)
        while pid and pid == self.pid and not self._is_closed:
            with suppress(ChildProcessError):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    if deadline.has_passed:
                        return False
                    await asyncio.sleep(0.02)
                    continue
            break
        return True

    def kill(self) -> None:
        """Ends the server and its helpers; the next helper starts another."""
        with self._lock:
            self._kill()

    def close(self) -> None:
        """Ends the server and its helpers for good; calls that wait fail."""
        with self._lock:
            self._is_closed = True
            self._kill()

    def _kill(self) -> None:
        self._control.close()
        pid, self.pid = self.pid, 0
        if pid:
            with suppress(ProcessLookupError, ChildProcessError):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def fork_helpers(
    control: socket.socket, owner: int, title: str, prepare: Callable[[], Work], limits: Limits
) -> NoReturn:
    """Forks a helper for each socket that arrives on `control`, until the owner has ended.

    Args:
        owner: a pidfd.
    """
    try:
        become_apart(title, {control.fileno(), owner})
        # The kernel then reaps the helpers.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.nice(limits.niceness)
        # The threads of tokenizers did not survive the fork.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # Not select(), which takes descriptors up to 1,023.
        events = select.poll()
        events.register(control, select.POLLIN)
        events.register(owner, select.POLLIN)
        work = None
        while owner not in dict(events.poll()):
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                break
            # Not at the start: most servers never need some of their helpers.
            work = work or prepare()
            with socket.socket(fileno=descriptors[0]) as calls:
                # Sockets of an owner with greenlets do not block.
                calls.setblocking(True)
                server = os.getpid()
                if os.fork() == 0:
                    control.close()
                    os.close(owner)
                    _help(calls, server, work, limits)
    except BaseException:
        logger.exception("%s ends", title)
    finally:
        # With the helpers.
        os.killpg(0, signal.SIGKILL)
        os._exit(0)


def _help(calls: socket.socket, server: int, work: Work, limits: Limits) -> NoReturn:
    """Answers calls until the caller closes the connection, or the fork server has ended."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            # It ended before the line above.
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if limits.memory_bytes:
            _limit_memory(limits.memory_bytes)
        _send(calls, os.getpid().to_bytes(4, "little"))
        with calls.makefile("rb") as stream:
            while head := stream.read(LENGTH.size):
                request = stream.read(*LENGTH.unpack(head))
                # It ends the process, also within C.
                signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
                answer = work(request)
                signal.setitimer(signal.ITIMER_PROF, 0)
                _send(calls, answer)
    except ConnectionError:
        # Nobody waits for the answer any more.
        pass
    except BaseException:
        logger.exception("a helper ends")
    finally:
        os._exit(0)


def _send(calls: socket.socket, answer: Answer) -> None:
    if isinstance(answer, bytes):
        calls.sendall(LENGTH.pack(len(answer)))
        calls.sendall(answer)
        return
    socket.send_fds(calls, [LENGTH.pack(0)], [answer])
    os.close(answer)


def _limit_memory(num_bytes: int) -> None:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def drop_descriptors(kept: Collection[int]) -> None:
    """Lets go of the owner's descriptors in a fork, but for the standard ones and those in `kept`."""
    # Not closed: an object of the owner may close its number later, and must not meet a new one there.
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (nothing, *kept):
            # The one with which the folder was listed is closed.
            with suppress(OSError):
                os.fstat(descriptor)
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def become_apart(title: str, kept: set[int]) -> None:
    """Drops in a fork what is its owner's: signals, descriptors, GPUs, and objects to finalise.

    Args:
        title: the command line that `ps` shows.
        kept: descriptors that stay open besides the standard ones.
    """
    # The collector never visits, and never finalises, the owner's objects here.
    gc.freeze()
    with suppress(ImportError):
        # vLLM names its processes with it.
        from setproctitle import setproctitle

        setproctitle(title)
    signal.set_wakeup_fd(-1)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGPROF", "SIGALRM", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    drop_descriptors(kept)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
