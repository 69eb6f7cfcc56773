"""`run_rollouts` for asyncio. The rollouts play in threads, with a client that blocks."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from titopool.client.async_client import AsyncClient
from titopool.client.sync_client import Client
from titopool.rollouts.rollout import Rollout
from titopool.rollouts.runner import run_rollouts
from titopool.rollouts.tools import is_coroutine_function


async def run_rollouts_async(
    client: AsyncClient,
    prompts: Sequence[Any],
    *,
    tools: Sequence[Callable[..., Any]] = (),
    environment: Callable[[Rollout], Any] | None = None,
    **options: Any,
) -> list[Rollout]:
    """Plays n rollouts of each prompt to their end, as `run_rollouts`, while the event loop goes on.

    A cancel stops the generation of all rollouts, and the coroutines of their tools. A function
    that runs in a thread ends by itself. The same goes for rollouts that `num_needed` drops.

    Args:
        client: names the server. The rollouts have connections of their own, and block: call their
            methods outside of the event loop (`asyncio.to_thread`) where they call the server.
        tools: functions as for `run_rollouts`. A coroutine function runs in the caller's event
            loop, any other one in a thread.
        environment: the same.
        options: the other arguments of `run_rollouts`.

    Returns:
        As `run_rollouts`.

    Raises:
        ValueError: an argument or a prompt is not usable; nothing has run.
    """
    loop = _Loop()
    # Of its own: who runs in asyncio's default threads may wait for others there. The second one ends
    # the client of a run that was cancelled.
    threads = ThreadPoolExecutor(2, "rollouts")
    in_thread = functools.partial(asyncio.get_running_loop().run_in_executor, threads)
    blocking = _Blocking(client)
    end = blocking.stop
    try:
        run = functools.partial(
            run_rollouts,
            blocking,
            prompts,
            tools=[loop.blocking(tool) for tool in tools],
            environment=environment and loop.blocking(environment),
            **options,
        )
        rollouts = await in_thread(run)
        end = blocking.close
    finally:
        loop.cancel()
        await in_thread(end)
        threads.shutdown(wait=False)
    return rollouts


class _Blocking(Client):
    """A client that blocks, of the same server; what the caller's client has aborted does not go on."""

    def __init__(self, client: AsyncClient):
        super().__init__(
            client.base_url, api_key=client.api_key, admin_key=client.admin_key,
            timeout_s=client.timeout_s,
        )  # fmt: skip
        self._callers = client

    @property
    def num_aborts(self) -> int:
        return self._callers.num_aborts


class _Loop:
    """Runs coroutine functions in the caller's event loop for threads that wait for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: set[Future[Any]] = set()
        self._is_cancelled = False

    def blocking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`; a coroutine function as one that waits."""
        if not is_coroutine_function(function):
            return function

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            self._check()
            future = asyncio.run_coroutine_threadsafe(function(*args, **named), self._loop)
            self._calls.add(future)
            future.add_done_callback(self._calls.discard)
            if self._is_cancelled:
                future.cancel()
            try:
                return future.result()
            except CancelledError:
                self._check()
                raise

        return call

    def _check(self) -> None:
        if self._is_cancelled:
            # No Exception: what goes on after an error must not go on here.
            raise asyncio.CancelledError("the run has ended")

    def cancel(self) -> None:
        """Cancels the calls that run, and later ones."""
        self._is_cancelled = True
        for call in list(self._calls):
            call.cancel()
