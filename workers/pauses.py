"""Why an engine stands: a client's pause, which has a lease, or an update, which has a deadline."""

import time

from titopool.commands import Policy
from titopool.errors import Conflict
from workers.weight_engine import WeightEngine


class Pauses:
    """Who holds generation, of one worker."""

    def __init__(self) -> None:
        self._lease_mode: Policy | None = None
        self._lease_end: float | None = None
        self._is_updating = False

    @property
    def lease_left_s(self) -> float | None:
        """Seconds that a client's pause has left; None: there is none."""
        return None if self._lease_end is None else max(0.0, self._lease_end - time.monotonic())

    def check(self, policy: Policy) -> None:
        """Raises Conflict if requests are held back that `policy` would wait for."""
        if policy == "drain" and self._lease_end is not None and self._lease_mode == "keep":
            raise Conflict(
                "policy: generation is paused with mode keep, so nothing drains; resume, or "
                "commit with keep or abort"
            )

    async def lease(self, engine: WeightEngine, mode: Policy, lease_s: float) -> None:
        """Pauses for a client, or renews its lease."""
        if self._is_updating:
            raise Conflict("pause: a weight update is being committed; try again")
        if self._lease_end is None or mode != self._lease_mode:
            self.check(mode)
            # From here on: a drain may take longer than the lease.
            self._lease_mode, self._lease_end = mode, time.monotonic() + lease_s
            await engine.pause(mode)
            if self._lease_end is None:
                raise Conflict(
                    "pause: the lease ended, or generation was resumed, before it stood; try again with "
                    "a longer lease_s"
                )
        self._lease_mode, self._lease_end = mode, time.monotonic() + lease_s

    async def resume(self, engine: WeightEngine) -> bool:
        """Ends a client's pause; returns whether there was one."""
        was_paused = self._lease_end is not None
        self._lease_mode = self._lease_end = None
        if was_paused and not self._is_updating:
            await engine.resume()
        return was_paused

    async def begin_update(self, engine: WeightEngine, policy: Policy) -> None:
        """Pauses for a commit."""
        self.check(policy)
        self._is_updating = True
        await engine.pause(policy)

    async def end_update(self, engine: WeightEngine) -> None:
        """Goes on after a commit, unless a client holds generation."""
        if self._is_updating:
            self._is_updating = False
            if self._lease_end is None:
                await engine.resume()

    def has_lapsed(self) -> bool:
        """Whether a client's lease has ended without a word of it."""
        return self.lease_left_s == 0.0
