"""How requests of one front end share a native thread.

Work that would block the other requests goes to a thread: tokenizing, rendering, images.
"""

import ctypes
import errno
import functools
import itertools
import socket
import time
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Any, TypeVar, cast

import gevent
from gevent.event import AsyncResult
from gevent.monkey import get_original
from gevent.subprocess import Popen
from gevent.threadpool import ThreadPool

from app.http.connections import client_gone, watching

Result = TypeVar("Result")

# Between two attempts to end a call.
END_AGAIN_S = 0.1
# Of threads, not of greenlets.
_allocate_lock = get_original("_thread", "allocate_lock")
_start_new_thread = get_original("_thread", "start_new_thread")
_get_ident = get_original("_thread", "get_ident")
# A call of this size waits at most one second for smaller ones that came after it.
SIZE_PER_S = 100_000
_numbers = itertools.count()
# The time up to which smaller calls go before this one, its number, the call, its outcome.
Waiting = tuple[float, int, Callable[[], Any], AsyncResult]


class Turns:
    """Small calls come before large ones; calls whose client has left are skipped."""

    def __init__(self) -> None:
        # Made with the first call: a thread must not be started before gunicorn forks.
        self._pool: ThreadPool | None = None
        # A heap, the next call first.
        self._waiting: list[Waiting] = []
        self._is_running = False

    @property
    def is_idle(self) -> bool:
        """Whether no call runs or waits."""
        return not self._is_running

    def call(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        size: int = 0,
        client: socket.socket | None = None,
    ) -> Result:
        """What `function(*arguments)` returns or raises.

        A call that has begun goes on after its client has left, as a thread cannot be stopped.

        Args:
            size: what the call's time grows with, in characters or bytes.
            client: as in `watching`.

        Raises:
            ClientGone: the client has hung up before the end of the call.
        """
        outcome = self.submit(function, *arguments, size=size)
        gone = client_gone()
        try:
            with watching(client, lambda: outcome.set_exception(gone)):
                return cast("Result", outcome.get())
        finally:
            if not outcome.ready():
                # The caller's timeout.
                outcome.set_exception(gone)

    def submit(self, function: Callable[..., Any], *arguments: Any, size: int = 0) -> AsyncResult:
        """The outcome of a call, which is skipped if the outcome is set before its turn."""
        outcome = AsyncResult()
        last = time.monotonic() + size / SIZE_PER_S
        entry: Waiting = (last, next(_numbers), partial(function, *arguments), outcome)
        heappush(self._waiting, entry)
        if not self._is_running:
            self._is_running = True
            gevent.spawn(self._run)
        return outcome

    def _run(self) -> None:
        try:
            while self._waiting:
                *_, call, outcome = heappop(self._waiting)
                if outcome.ready():
                    continue
                try:
                    result, error = self._in_thread(call)
                except Exception as failure:
                    # No thread can be started, for example.
                    result, error = None, failure
                if not outcome.ready():
                    outcome.set(result) if error is None else outcome.set_exception(error)
        finally:
            self._is_running = False

    def _in_thread(self, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        if self._pool is None:
            _start_processes_in_the_main_thread_only()
            self._pool = ThreadPool(1)
        outcome: tuple[Any, Exception | None] = self._pool.spawn(_caught, call).get()
        return outcome


@functools.cache
def _start_processes_in_the_main_thread_only() -> None:
    """Makes a process that another thread starts fail with OSError, as if the system refused it.

    gevent cannot start one there and raises TypeError. Modules that transformers imports ask
    processes for the names of libraries (`ctypes.util.find_library`) and go on after an OSError.
    """
    start = Popen.__init__

    @functools.wraps(start)
    def start_or_refuse(self: Popen, *arguments: Any, **options: Any) -> None:
        if not gevent.get_hub().loop.default:
            raise OSError(
                errno.EAGAIN, "expected the main thread to start a process; this is another one"
            )
        start(self, *arguments, **options)

    Popen.__init__ = start_or_refuse


def within(limit_s: float, function: Callable[[], Result]) -> Result:
    """What `function` returns or raises; only Python code can be ended, native code ends first.

    Args:
        limit_s: CPU seconds of this thread.

    Raises:
        TimeoutError: the call took longer.
    """
    watch = _CpuWatch(limit_s)
    try:
        _start_new_thread(watch.run, ())
        result, error = _caught(function)
        watch.stop()
    except _Ended:
        # No thread runs between the exception and this assignment, so no second one can come.
        watch.is_stopped = True
        watch.stop()
        result, error = None, TimeoutError(f"it took more than {limit_s:g} s of CPU time")
    if error is not None:
        raise error
    return cast("Result", result)


class _Ended(BaseException):
    """Raised in the midst of a call; no handler of `Exception` in it keeps it."""


class _CpuWatch:
    """Ends what the thread that made it does, once that has taken too much CPU time."""

    def __init__(self, limit_s: float) -> None:
        thread = _get_ident()
        self._clock = time.pthread_getcpuclockid(thread)
        self._last_s = time.clock_gettime(self._clock) + limit_s
        # CPython's function for it; without a class, one that waits to be raised is dropped.
        self._raise = partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(thread))
        self._lock, self._is_over = _allocate_lock(), _allocate_lock()
        self._is_over.acquire()
        self.is_stopped = False

    def run(self) -> None:
        """In a thread of its own, until `stop`."""
        while not self._is_over.acquire(True, max(END_AGAIN_S, self._left_s)):
            with self._lock:
                # Again and again: what is raised in a finaliser is lost.
                if not self.is_stopped and self._left_s < 0:
                    self._raise(ctypes.py_object(_Ended))

    @property
    def _left_s(self) -> float:
        return self._last_s - time.clock_gettime(self._clock)

    def stop(self) -> None:
        """Nothing is raised any more when it returns; a second call does nothing."""
        with self._lock:
            self.is_stopped = True
            self._raise(None)
        if self._is_over.locked():
            self._is_over.release()


def _caught(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result or the error of a call: gevent logs exceptions that leave a thread.

    What is no `Exception` (a panic of a library in Rust, SystemExit) becomes a RuntimeError: it would
    end the greenlet that raises it for a caller, or this process.
    """
    try:
        return call(), None
    except Exception as error:
        return None, error
    except _Ended:
        raise
    except BaseException as error:
        failure = RuntimeError(f"a call in a thread ended with {type(error).__name__}: {error}")
        failure.__cause__ = error
        return None, failure
