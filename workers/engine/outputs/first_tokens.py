"""Tells which requests have their first token, also those whose output comes as a whole.

vLLM's engine sends tokens to the worker's process at each step, so a look at its open requests is
enough; the engine process is not asked.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# How late a first token may be noticed.
INTERVAL_S = 0.05


class FirstTokens:
    """Calls a function for each request at its first token, as long as the request is open."""

    def __init__(self, states: Callable[[], Mapping[str, Any]]):
        """`states` returns vLLM's RequestState of each open completion."""
        self._states = states
        # By request id.
        self._waiting: dict[str, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watched(self, request_id: str, on_first: Callable[[], None]) -> Iterator[None]:
        """Within the block, `on_first` is called once the request has a token."""
        self._waiting[request_id] = on_first
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            self._waiting.pop(request_id, None)

    async def _watch(self) -> None:
        while self._waiting:
            await asyncio.sleep(INTERVAL_S)
            for state in list(self._states().values()):
                if not state.is_prefilling and state.external_req_id in self._waiting:
                    self._waiting.pop(state.external_req_id)()
