"""Who pauses generation: a client, whose pause has a lease, or a commit, which has a deadline."""

import asyncio
import logging
import time

from titopool.errors import Conflict
from titopool.wire.distributions import Durations
from titopool.wire.pool_state import PauseMode, PoolPause
from workers.engine.weights import WeightEngine
from workers.weights.pool_copy import PoolCopy

logger = logging.getLogger(__name__)


class Pauses:
    """The client's pause and the commit of one worker; generation runs when there is neither."""

    def __init__(self, pool: PoolCopy) -> None:
        self._pool = pool
        self._lease_mode: PauseMode | None = None
        self._lease_end: float | None = None
        # The lease that calls for weights begin again; None: they do not.
        self._renewed_s: float | None = None
        # The order of the pool's last pause or resume that this worker has taken over.
        self._followed = PoolPause().order
        # Pauses the engine after a pause of the pool.
        self._follow_task: asyncio.Task[None] | None = None
        self._no_commit = asyncio.Event()
        self._no_commit.set()
        # When the commit in progress stopped generation, and how long all that have ended did.
        self._commit_begin = 0.0
        self.commits_s = 0.0
        self._commit_mode: PauseMode = "keep"
        # When the client's pause began.
        self._lease_begin = 0.0
        # Pauses that have ended, of clients and of commits, by mode.
        self.totals: dict[str, Durations] = {}
        # Whether generation stays paused until the process ends, because the model is broken.
        self.never_resumes = False
        # Whether it stays paused until new weights are complete: the model is half another one's.
        self.is_held = False

    @property
    def is_committing(self) -> bool:
        """Whether a commit pauses generation."""
        return not self._no_commit.is_set()

    @property
    def may_resume(self) -> bool:
        """Whether the model may generate."""
        return not self.never_resumes and not self.is_held

    @property
    def lease_left_s(self) -> float | None:
        """Seconds until the lease of the client's pause expires; None without such a pause."""
        return None if self._lease_end is None else max(0.0, self._lease_end - time.monotonic())

    def has_expired(self) -> bool:
        """Whether the client's pause lease has expired."""
        return self.lease_left_s == 0.0

    @property
    def keeps_requests(self) -> bool:
        """Whether a client's pause keeps requests in flight."""
        return self._lease_end is not None and self._lease_mode == "keep"

    def check_mode(self, mode: PauseMode) -> None:
        """Raises Conflict for a drain that could not end because a pause keeps the requests."""
        if mode == "drain" and self.keeps_requests:
            raise Conflict(
                "policy: expected keep or abort, got drain, while generation is paused with mode keep: "
                "the kept requests cannot drain; resume first, or use keep or abort"
            )

    # ---- a client's pause --------------------------------------------------------------

    async def pause(
        self,
        engine: WeightEngine,
        mode: PauseMode,
        lease_s: float,
        clock: int = 0,
        *,
        is_renewed: bool = False,
    ) -> None:
        """Pauses for a client, or renews the lease. During a commit, it waits for the commit's end.

        Args:
            is_renewed: whether `renew` begins the lease again.

        Raises:
            Conflict: generation was resumed, or the lease expired, before generation stopped.
        """
        is_new = self._lease_end is None or mode != self._lease_mode
        if is_new:
            self.check_mode(mode)
        # The lease also counts while requests in flight drain.
        self._renewed_s = lease_s if is_renewed else None
        self._set_lease(mode, lease_s)
        self._record(mode, lease_s, clock)
        # While the model is held, generation stands, and `end_commit` will not resume it.
        if is_new and not self.is_held:
            await self._no_commit.wait()
            if self._lease_end is not None:
                await engine.pause(mode)
            if self._lease_end is None:
                raise Conflict(
                    "pause: the lease expired, or generation was resumed, before generation had "
                    "stopped; try again with a longer lease_s"
                )
            self._set_lease(mode, lease_s)

    def renew(self) -> None:
        """Begins the lease of a client's pause again, if the pause allows it."""
        if self._lease_end is not None and self._lease_mode and self._renewed_s is not None:
            self._set_lease(self._lease_mode, self._renewed_s)
            self._record(self._lease_mode, self._renewed_s, 0)

    async def resume(self, engine: WeightEngine, clock: int = 0) -> bool:
        """Ends a client's pause; returns whether there was a pause."""
        self._record(None, 0.0, clock)
        return await self._clear_lease(engine)

    async def expire(self, engine: WeightEngine) -> None:
        """Ends a pause whose lease has expired; each worker does that for itself."""
        await self._clear_lease(engine)

    async def follow_pool(self, engine: WeightEngine) -> None:
        """Takes over the pool's last pause or resume if this worker has missed it."""
        wanted = self._pool.pause
        if wanted.order <= self._followed or self.is_committing:
            return
        self._followed = wanted.order
        if wanted.mode is None:
            await self._clear_lease(engine)
        else:
            was_paused = self._lease_end is not None
            self._set_lease(wanted.mode, wanted.lease_left_s)
            if not was_paused:
                # A task, because a drain takes as long as the longest request.
                self._follow_task = asyncio.create_task(self._pause_engine(engine, wanted.mode))

    async def _pause_engine(self, engine: WeightEngine, mode: PauseMode) -> None:
        try:
            await engine.pause(mode)
        except Exception:
            logger.exception("generation could not be paused as in the rest of the pool")

    def _set_lease(self, mode: PauseMode, lease_s: float) -> None:
        if self._lease_end is None:
            self._lease_begin = time.monotonic()
        self._lease_mode, self._lease_end = mode, time.monotonic() + lease_s

    def _record(self, mode: PauseMode | None, lease_s: float, clock: int) -> None:
        self._pool.record_pause(mode, lease_s, clock)
        self._followed = self._pool.pause.order

    async def _clear_lease(self, engine: WeightEngine) -> bool:
        was_paused = self._lease_end is not None
        if was_paused and self._lease_mode is not None:
            self._count(self._lease_mode, time.monotonic() - self._lease_begin)
        self._lease_mode = self._lease_end = self._renewed_s = None
        if was_paused:
            await self._resume(engine)
        return was_paused

    # ---- a commit ----------------------------------------------------------------------

    async def wait_for_commit(self) -> None:
        """Returns when no commit pauses generation."""
        await self._no_commit.wait()

    async def begin_commit(self, engine: WeightEngine, mode: PauseMode) -> None:
        """Pauses generation for a commit."""
        self.check_mode(mode)
        self._no_commit.clear()
        self._commit_mode = mode
        self._commit_begin = time.monotonic()
        await engine.pause(mode)

    async def end_commit(self, engine: WeightEngine) -> None:
        """Resumes generation after a commit, unless a client has paused it."""
        if self.is_committing and self.may_resume:
            self._no_commit.set()
            await self._resume(engine)
            seconds = time.monotonic() - self._commit_begin
            self.commits_s += seconds
            self._count(self._commit_mode, seconds)

    def _count(self, mode: PauseMode, seconds: float) -> None:
        self.totals.setdefault(mode, Durations()).add(seconds)

    async def _resume(self, engine: WeightEngine) -> None:
        """Resumes generation unless a commit or a client pauses it.

        Also if the calling task is cancelled: no other task would resume generation.
        """

        async def resume() -> None:
            # Asked again in the step that sends it: a pause may have been sent in between.
            if not self.is_committing and self._lease_end is None:
                await engine.resume()

        await asyncio.shield(resume())
