"""What one worker knows of its pool, and whether it has missed something.

Runs in: each worker process, on its loop. Commands record what they change here; front ends tell
the rest (`titopool/wire/pool_state.py`). `workers/serving/catch_up.py` acts on it.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from titopool.wire.pool_state import (
    AdapterRecord,
    PauseMode,
    PoolAdapters,
    PoolPause,
    PoolState,
    PoolWeights,
    next_clock,
)
from workers.ledger import Ledger


class PoolView:
    """The pool's state as of the last command or Hello."""

    def __init__(self, ledger: Ledger, on_news: Callable[[], None]):
        """`on_news` is called when a front end has told something new."""
        self._ledger = ledger
        self._on_news = on_news
        self._state = PoolState()
        # When the pause of `_state` ends (monotonic).
        self._lease_end = 0.0
        # Whether the engine is loaded.
        self.is_started = False

    @property
    def weights(self) -> PoolWeights:
        """Those that all workers should have."""
        return self._state.weights

    @property
    def adapters(self) -> PoolAdapters:
        return self._state.adapters

    @property
    def pause(self) -> PoolPause:
        """With what is left of its lease now."""
        left_s = max(0.0, self._lease_end - time.monotonic())
        pause = self._state.pause
        return msgspec.structs.replace(
            pause, mode=pause.mode if left_s else None, lease_left_s=left_s
        )

    @property
    def state(self) -> PoolState:
        """All of it, as a message tells it."""
        return msgspec.structs.replace(self._state, pause=self.pause)

    def start(self, model: str) -> None:
        """The engine is loaded: what was told of a pool with another model is dropped."""
        self.is_started = True
        heard, self._state = self.state, PoolState(model=model)
        self._take(self._ledger.read())
        self._take(heard)

    def hear(self, told: PoolState) -> None:
        """Takes what a front end knows."""
        if self._take(told) and self.is_started:
            self._ledger.write(self.state)
            self._on_news()

    def _take(self, told: PoolState) -> bool:
        before, self._state = self._state, self._state.merged(told)
        if self._state.pause is not before.pause:
            self._lease_end = time.monotonic() + self._state.pause.lease_left_s
        return self._state is not before

    # ---- what this worker has done -----------------------------------------------------

    def record_weights(self, weights: PoolWeights) -> None:
        """An update is applied; a later one that is known already stays what all should have."""
        self._record(weights=max(self._state.weights, weights, key=lambda one: one.order))

    def record_pause(self, mode: PauseMode | None, lease_s: float, clock: int) -> None:
        """Generation is stopped, or goes on."""
        clock = max(clock, next_clock(self._state.pause.clock))
        self._lease_end = time.monotonic() + lease_s
        self._record(pause=PoolPause(clock, mode, lease_s))

    def record_adapter(self, name: str, record: AdapterRecord | None, clock: int) -> None:
        """An adapter serves, or (None) is taken away."""
        by_name = {key: one for key, one in self.adapters.by_name.items() if key != name}
        if record is not None:
            by_name[name] = record
        clock = max(clock, next_clock(self.adapters.clock))
        self._record(adapters=PoolAdapters(clock, by_name))

    def _record(self, **parts: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **parts)
        self._ledger.write(self.state)
