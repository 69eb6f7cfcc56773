"""A worker's copy of the pool's state (`titopool/wire/pool_state.py`).

Commands record their changes here, and front ends send the changes that this worker missed.
`workers/serving/catch_up.py` then brings the worker to the pool's state.
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


class PoolCopy:
    """The pool's state after the last command or `Hello`."""

    def __init__(self, ledger: Ledger, on_change: Callable[[], None]):
        """`on_change` is called when a front end has sent a newer state."""
        self._ledger = ledger
        self._on_change = on_change
        self._state = PoolState()
        # When the lease of the pause in `_state` expires (monotonic).
        self._lease_end = 0.0
        # Whether the engine is loaded.
        self.is_started = False

    @property
    def weights(self) -> PoolWeights:
        """The weights that all workers should have."""
        return self._state.weights

    @property
    def adapters(self) -> PoolAdapters:
        """The LoRA adapters that all workers should have."""
        return self._state.adapters

    @property
    def pause(self) -> PoolPause:
        """The pause with the rest of its lease; its mode is None after the lease has expired."""
        left_s = max(0.0, self._lease_end - time.monotonic())
        pause = self._state.pause
        return msgspec.structs.replace(
            pause, mode=pause.mode if left_s else None, lease_left_s=left_s
        )

    @property
    def state(self) -> PoolState:
        """The whole state, as messages carry it."""
        return msgspec.structs.replace(self._state, pause=self.pause)

    def start(self, model: str) -> None:
        """Called when the engine has loaded `model`: drops the state of a pool with another model."""
        self.is_started = True
        received, self._state = self.state, PoolState(model=model)
        self._merge(self._ledger.read())
        self._merge(received)

    def merge(self, received: PoolState) -> None:
        """Merges a front end's state into this one."""
        if self._merge(received) and self.is_started:
            self._ledger.write(self.state)
            self._on_change()

    def _merge(self, received: PoolState) -> bool:
        """Returns whether `received` has changed the state."""
        before, self._state = self._state, self._state.merged(received)
        if self._state.pause is not before.pause:
            self._lease_end = time.monotonic() + self._state.pause.lease_left_s
        return self._state is not before

    # ---- changes that this worker has made ------------------------------------------

    def record_weights(self, weights: PoolWeights) -> None:
        """Records weights that were applied, unless the pool has later ones already."""
        self._record(weights=max(self._state.weights, weights, key=lambda one: one.order))

    def record_label(self, label: str, clock: int) -> None:
        """Records the trainer's own name for the pool's weights."""
        weights = self._state.weights
        clock = max(clock, next_clock(weights.label_clock))
        self._record(weights=msgspec.structs.replace(weights, label=label, label_clock=clock))

    def record_pause(self, mode: PauseMode | None, lease_s: float, clock: int) -> None:
        """Records that a client has paused generation, or (mode None) resumed it."""
        clock = max(clock, next_clock(self._state.pause.clock))
        self._lease_end = time.monotonic() + lease_s
        self._record(pause=PoolPause(clock, mode, lease_s))

    def record_adapter(self, name: str, record: AdapterRecord | None, clock: int) -> None:
        """Records an adapter that serves under `name`, or (None) that it was unloaded."""
        by_name = {key: one for key, one in self.adapters.by_name.items() if key != name}
        if record is not None:
            by_name[name] = record
        clock = max(clock, next_clock(self.adapters.clock))
        self._record(adapters=PoolAdapters(clock, by_name))

    def _record(self, **parts: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **parts)
        self._ledger.write(self.state)
