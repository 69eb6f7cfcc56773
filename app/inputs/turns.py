"""How requests of one front end share a native thread.

Work that would block the other requests goes to a thread: tokenizing, rendering, images.
"""

import itertools
import socket
import time
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Any, TypeVar, cast

import gevent
from gevent.event import AsyncResult
from gevent.threadpool import ThreadPool

from app.http.connections import client_gone, watching

Result = TypeVar("Result")

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
        self._pool = self._pool or ThreadPool(1)
        try:
            while self._waiting:
                *_, call, outcome = heappop(self._waiting)
                if outcome.ready():
                    continue
                result, error = self._pool.spawn(_caught, call).get()
                if not outcome.ready():
                    outcome.set(result) if error is None else outcome.set_exception(error)
        finally:
            self._is_running = False


def _caught(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result or the error of a call: gevent logs exceptions that leave a thread."""
    try:
        return call(), None
    except Exception as error:
        return None, error
