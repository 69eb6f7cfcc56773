"""Outcomes of asynchronous calls by key: equal calls share one, and the last outcomes are kept."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Outcome = TypeVar("Outcome")


class SharedCalls(Generic[Outcome]):
    """The calls that run, and the outcomes of past ones, on one event loop."""

    def __init__(self, max_bytes: int, size_of: Callable[[Outcome], int]):
        """`max_bytes`: of the outcomes that are kept, as `size_of` measures them."""
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._num_bytes = 0
        # The least recently used first.
        self._calls: OrderedDict[bytes, asyncio.Task[Outcome]] = OrderedDict()
        self._sizes: dict[bytes, int] = {}
        # Of each call that runs, or whose outcome a caller is about to take.
        self._num_callers: Counter[asyncio.Task[Outcome]] = Counter()

    async def outcome(
        self, key: bytes, call: Callable[[], Coroutine[Any, Any, Outcome]]
    ) -> tuple[Outcome, bool]:
        """The outcome of `call`, or of an equal one, and whether `call` was made.

        A call ends when all its callers are cancelled. What fails is not kept.
        """
        task = self._calls.get(key)
        is_new = task is None
        if task is None:
            task = self._calls[key] = asyncio.get_running_loop().create_task(call())
            task.add_done_callback(lambda task: self._keep(key, task))
        self._calls.move_to_end(key)
        self._num_callers[task] += 1
        try:
            return await asyncio.shield(task), is_new
        finally:
            self._num_callers[task] -= 1
            if not self._num_callers[task]:
                del self._num_callers[task]
                if not task.done():
                    self._forget(key, task)
                    task.cancel()

    def _forget(self, key: bytes, task: "asyncio.Task[Outcome]") -> None:
        # A later call may have the key already.
        if self._calls.get(key) is task:
            del self._calls[key]

    def _keep(self, key: bytes, task: "asyncio.Task[Outcome]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._forget(key, task)
            return
        size = self._size_of(task.result())
        if size > self._max_bytes or self._calls.get(key) is not task:
            self._forget(key, task)
            return
        self._sizes[key] = size
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            # A call that runs has no size yet.
            oldest = next(one for one in self._calls if one in self._sizes)
            del self._calls[oldest]
            self._num_bytes -= self._sizes.pop(oldest)
