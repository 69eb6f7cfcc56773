"""Why generation is stopped: a client's pause, which has a lease, or a commit, which has a deadline."""

import asyncio
import logging
import time

from titopool.errors import Conflict
from titopool.wire.commands import PauseMode
from titopool.wire.pool_state import PoolPause
from workers.engine.weights import WeightEngine
from workers.weights.pool_view import PoolView

logger = logging.getLogger(__name__)


class Pauses:
    """Who holds the generation of one worker."""

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool
        self._lease_mode: PauseMode | None = None
        self._lease_end: float | None = None
        # Of the pool's pauses, the last one that this worker follows.
        self._followed = PoolPause().order
        # Stops generation as the pool did.
        self._following: asyncio.Task[None] | None = None
        self._no_commit = asyncio.Event()
        self._no_commit.set()

    @property
    def is_committing(self) -> bool:
        """Whether a commit holds generation."""
        return not self._no_commit.is_set()

    @property
    def lease_left_s(self) -> float | None:
        """Seconds that a client's pause has left; None: there is none."""
        return None if self._lease_end is None else max(0.0, self._lease_end - time.monotonic())

    def has_expired(self) -> bool:
        """Whether the lease of a client's pause has expired."""
        return self.lease_left_s == 0.0

    @property
    def keeps_requests(self) -> bool:
        """Whether a client's pause holds back the requests in flight."""
        return self._lease_end is not None and self._lease_mode == "keep"

    def check(self, policy: PauseMode) -> None:
        """Raises Conflict if requests are held back that `policy` would wait for."""
        if policy == "drain" and self.keeps_requests:
            raise Conflict(
                "policy: generation is paused with mode keep, so nothing drains; resume, or "
                "commit with keep or abort"
            )

    # ---- a client's pause --------------------------------------------------------------

    async def lease(
        self, engine: WeightEngine, mode: PauseMode, lease_s: float, clock: int = 0
    ) -> None:
        """Pauses for a client, or renews its lease; during a commit, from its end on."""
        is_new = self._lease_end is None or mode != self._lease_mode
        if is_new:
            self.check(mode)
        # The lease counts from here, also while the requests in flight drain.
        self._hold(mode, lease_s)
        self._record(mode, lease_s, clock)
        if is_new:
            await self._no_commit.wait()
            if self._lease_end is not None:
                await engine.pause(mode)
            if self._lease_end is None:
                raise Conflict(
                    "pause: the lease expired, or generation was resumed, before generation had "
                    "stopped; try again with a longer lease_s"
                )
            self._hold(mode, lease_s)

    async def resume(self, engine: WeightEngine, clock: int = 0) -> bool:
        """Ends a client's pause; returns whether there was one."""
        self._record(None, 0.0, clock)
        return await self._let_go(engine)

    async def expire(self, engine: WeightEngine) -> None:
        """Ends a pause whose lease has expired; the others notice that by themselves."""
        await self._let_go(engine)

    async def follow_pool(self, engine: WeightEngine) -> None:
        """Does what the pool has done while this worker was away."""
        told = self._pool.pause
        if told.order <= self._followed or self.is_committing:
            return
        self._followed = told.order
        if told.mode is None:
            await self._let_go(engine)
        else:
            is_paused = self._lease_end is not None
            self._hold(told.mode, told.lease_left_s)
            if not is_paused:
                # A drain takes as long as the longest request, or longer than the lease.
                self._following = asyncio.create_task(self._stop(engine, told.mode))

    async def _stop(self, engine: WeightEngine, mode: PauseMode) -> None:
        try:
            await engine.pause(mode)
        except Exception:
            logger.exception("generation could not be paused as in the rest of the pool")

    def _hold(self, mode: PauseMode, lease_s: float) -> None:
        self._lease_mode, self._lease_end = mode, time.monotonic() + lease_s

    def _record(self, mode: PauseMode | None, lease_s: float, clock: int) -> None:
        self._pool.record_pause(mode, lease_s, clock)
        self._followed = self._pool.pause.order

    async def _let_go(self, engine: WeightEngine) -> bool:
        was_paused = self._lease_end is not None
        self._lease_mode = self._lease_end = None
        if was_paused and not self.is_committing:
            await _go_on(engine)
        return was_paused

    # ---- a commit ----------------------------------------------------------------------

    async def begin_commit(self, engine: WeightEngine, policy: PauseMode) -> None:
        """Pauses for a commit."""
        self.check(policy)
        self._no_commit.clear()
        await engine.pause(policy)

    async def end_commit(self, engine: WeightEngine) -> None:
        """Goes on after a commit, unless a client holds generation."""
        if self.is_committing:
            self._no_commit.set()
            if self._lease_end is None:
                await _go_on(engine)


async def _go_on(engine: WeightEngine) -> None:
    """Lets generation go on, also when the step or call that asks for it is ended meanwhile: by
    then nobody holds generation any more, so nobody else would let it go on."""
    await asyncio.shield(engine.resume())
