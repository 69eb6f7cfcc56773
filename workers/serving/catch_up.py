"""Brings a worker to the state of its pool after the worker has missed commands.

A worker misses commands while it restarts and while front ends cannot reach it. The pool's state is
in `workers/weights/pool_copy.py`.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from titopool.errors import TitopoolError
from titopool.wire.commands import (
    AbortUpdate,
    ApplyUpdate,
    BeginFolder,
    PrepareUpdate,
)
from titopool.wire.pool_state import AdapterRecord, PoolWeights
from workers.engine.lora import Adapters
from workers.engine.weights import WeightEngine
from workers.in_model.checkpoint_files import digest_of_files
from workers.weights.checks import checked_folder
from workers.weights.pauses import Pauses
from workers.weights.pool_copy import PoolCopy
from workers.weights.state import Phase
from workers.weights.updates import Updates

logger = logging.getLogger(__name__)

# Between two attempts while the pool's state does not change: the first attempt may have failed.
RETRY_S = 1.0
# Attempts to load the right folder, which may be on a file server that is down.
MAX_TRIES = 10


class CatchUp:
    """Compares the worker's pause, weights and adapters with the pool's, and closes the gap."""

    def __init__(
        self,
        pool: PoolCopy,
        updates: Updates,
        pauses: Pauses,
        *,
        engine: Callable[[], WeightEngine],
        adapters: Callable[[], Adapters],
        weights_root: str,
        on_changed: Callable[[], None],
    ):
        """`on_changed` is called when other adapters serve, and when weights are unavailable."""
        self._pool = pool
        self._updates = updates
        self._pauses = pauses
        self._engine = engine
        self._adapters = adapters
        self._weights_root = weights_root
        self._on_changed = on_changed
        self._has_changed = asyncio.Event()
        # A worker that starts catches up in its own time, and when the first front end greets it.
        self._catching_up = asyncio.Lock()
        # The order of the weights that this worker cannot load.
        self._unavailable: tuple[int, str] = (0, "")
        # Why, and why no other worker gives them.
        self._reason = self._no_peer = ""
        # Attempts, by the order of the weights.
        self._num_tries: Counter[tuple[int, str]] = Counter()
        # The last error of each part of the state, so that the log shows it once.
        self._last_errors: dict[str, str] = {}
        # Names and versions of adapters that could not be loaded, so that the log shows them once.
        self._failed: set[tuple[str, int]] = set()

    @property
    def is_loading(self) -> bool:
        """Whether this worker is loading the pool's weights, or will load them from their folder."""
        state, wanted = self._updates.state, self._pool.weights
        if state.update is not None and state.update.update_id == wanted.update_id:
            return state.phase in (Phase.PREPARED, Phase.APPLYING) or state.is_apart
        return bool(wanted.folder) and self._unavailable != wanted.order

    @property
    def why_behind(self) -> str:
        """Why this worker lacks the pool's weights; "" if it has them, or may get them soon."""
        if not self._updates.is_behind_pool or self._unavailable != self._pool.weights.order:
            return ""
        why_no_peer = self._no_peer or self._updates.state.last_end
        return f"{self._reason}; {why_no_peer}" if why_no_peer else self._reason

    def note_no_peer(self, reason: str) -> None:
        """Called when no other worker gives the pool's weights; with "" when one does."""
        if reason not in ("", self._no_peer):
            logger.warning("no other worker gives the pool's weights: %s", reason)
        self._no_peer = reason

    def notify(self) -> None:
        """Called when the pool's state has changed."""
        self._has_changed.set()

    async def run(self) -> None:
        """Catches up after each change of the pool's state; never returns."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_changed.wait(), RETRY_S)
            self._has_changed.clear()
            if self._pool.is_started:
                await self.catch_up()

    async def catch_up(self) -> None:
        """Tries once to reach the pool's state; errors are logged."""
        async with self._catching_up:
            await self._follow()

    async def _follow(self) -> None:
        for follow in (self._follow_pauses, self._follow_weights, self._follow_adapters):
            text = ""
            try:
                await follow()
            except TitopoolError as error:
                text = error.message
                if text != self._last_errors.get(follow.__name__):
                    logger.warning("this worker is behind its pool: %s", text)
            except Exception:
                logger.exception("this worker could not catch up with its pool")
            self._last_errors[follow.__name__] = text

    async def _follow_pauses(self) -> None:
        await self._pauses.follow_pool(self._engine())

    async def _follow_weights(self) -> None:
        updates, state, wanted = self._updates, self._updates.state, self._pool.weights
        update = state.update
        if not updates.is_behind_pool:
            # Both have the initial weights, which the pool may have accepted under another clock.
            if state.weights.order != wanted.order and state.is_resting:
                state.accept_initial(wanted)
        elif state.phase is Phase.PREPARED and update is not None:
            if update.update_id == wanted.update_id:
                # Another worker has applied the update, so all workers are prepared.
                await updates.apply(ApplyUpdate(update.update_id))
                await updates.steps.wait("apply", update.update_id)
            elif wanted.clock >= update.clock:
                reason = "the pool has applied another update without this worker"
                await updates.abort(AbortUpdate(update.update_id, reason))
        elif state.is_resting and self._unavailable != wanted.order:
            await self._try_to_load(wanted)

    async def _try_to_load(self, wanted: PoolWeights) -> None:
        if wanted.is_initial:
            self._updates.return_to_initial()
        elif not wanted.folder:
            self._give_up(wanted, "they were sent through a group")
        # The digest is "" while the file server is down.
        elif digest_of_files(wanted.folder) not in ("", wanted.files):
            self._give_up(wanted, f"{wanted.folder} has changed since the update")
        else:
            await self._try_folder(wanted)

    def _give_up(self, wanted: PoolWeights, reason: str) -> None:
        self._unavailable, self._reason, self._no_peer = wanted.order, reason, ""
        self._num_tries.clear()
        logger.warning(
            "this worker lacks the pool's weights of version %d and cannot load them: %s; it waits "
            "for another worker's, or for the next update", wanted.version, reason,
        )  # fmt: skip
        self._on_changed()

    async def _try_folder(self, wanted: PoolWeights) -> None:
        self._num_tries[wanted.order] += 1
        try:
            await self._load_folder(wanted)
            self._num_tries.clear()
        except Exception as error:
            update = self._updates.state.update
            if update is not None and update.update_id == wanted.update_id:
                reason = "the folder could not be loaded"
                await self._updates.abort(AbortUpdate(update.update_id, reason))
            if self._num_tries[wanted.order] >= MAX_TRIES:
                self._give_up(wanted, str(error))
            raise

    async def _load_folder(self, wanted: PoolWeights) -> None:
        updates, update_id = self._updates, wanted.update_id
        action = BeginFolder(
            update_id, wanted.version, wanted.clock, wanted.folder, files=wanted.files
        )
        await updates.begin_folder(action, clock=wanted.clock)
        await updates.prepare(PrepareUpdate(update_id, updates.catch_up_mode))
        await updates.steps.wait("prepare", update_id)
        await updates.apply(ApplyUpdate(update_id))
        await updates.steps.wait("apply", update_id)

    async def _follow_adapters(self) -> None:
        adapters, wanted = self._adapters(), self._pool.adapters.by_name
        before = adapters.versions
        for name in before.keys() - wanted.keys():
            adapters.unload(name)
        for name, record in wanted.items():
            key = name, record.version
            if before.get(name) == record.version:
                continue
            try:
                await self._load_adapter(name, record)
                self._failed.discard(key)
            except TitopoolError as error:
                if key not in self._failed:
                    logger.warning("adapter %s could not be loaded: %s", name, error.message)
                self._failed.add(key)
        if adapters.versions != before:
            self._on_changed()

    async def _load_adapter(self, name: str, record: AdapterRecord) -> None:
        adapters = self._adapters()
        if not adapters.is_loaded(name, record.version):
            folder = checked_folder(record.folder, self._weights_root, "lora_path")
            await adapters.load(name, record.version, folder, record.files)
        adapters.switch(name, record.version)
