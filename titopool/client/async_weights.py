"""`WeightsClient` for asyncio: its calls run in threads, one after another.

Runs in: trainers.
"""

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from titopool.client.weights.trainer_group import run_in_thread
from titopool.client.weights_client import WeightsClient

P = ParamSpec("P")
R = TypeVar("R")


def _awaited(
    method: Callable[Concatenate[WeightsClient, P], R],
) -> Callable[Concatenate["AsyncWeightsClient", P], Coroutine[Any, Any, R]]:
    @functools.wraps(method)
    async def call(self: "AsyncWeightsClient", /, *args: P.args, **options: P.kwargs) -> R:
        # After a cancel the call ends at its next step, and a call that has not begun ends at once.
        is_cancelled = threading.Event()
        try:
            return await self._run(
                lambda: method(self.sender, *args, **options), is_cancelled.is_set
            )
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    return call


class AsyncWeightsClient:
    """`sender`'s calls, to await.

    A call that is cancelled raises at once. An update that is cancelled before its commit is sent
    ends at its next broadcast, and the old weights serve. The end of the block waits for that.
    """

    def __init__(self, sender: WeightsClient):
        self.sender = sender
        self._lock = threading.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """As `WeightsClient`'s; goes on in its thread if it is cancelled."""
        await self._run(self.sender.__exit__, lambda: False)

    open = _awaited(WeightsClient.open)
    update = _awaited(WeightsClient.update)
    update_from_folder = _awaited(WeightsClient.update_from_folder)
    load_lora = _awaited(WeightsClient.load_lora)
    pause = _awaited(WeightsClient.pause)
    resume = _awaited(WeightsClient.resume)
    close = _awaited(WeightsClient.close)

    async def _run(self, do: Callable[[], R], should_stop: Callable[[], bool]) -> R:
        def run() -> R:
            with self._lock:
                self.sender.should_stop = should_stop
                self.sender.check_going_on()
                return do()

        future = asyncio.wrap_future(run_in_thread(_on_this_stream(run)))
        # After a cancel nobody awaits the error, of which asyncio would warn.
        future.add_done_callback(lambda done: done.exception())
        # A cancel must not cancel the future, which the thread sets.
        result: R = await asyncio.shield(future)
        return result


def _on_this_stream(do: Callable[[], R]) -> Callable[[], R]:
    """`do` for another thread, with this thread's GPU and stream: what it reads may be computed there."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return do
    stream = torch.cuda.current_stream()

    def run() -> R:
        with torch.cuda.stream(stream):
            return do()

    return run
