"""Brings a worker to where its pool is, when it has missed a command.

Runs in: each worker process, on its loop. A worker misses commands while it restarts, or while it
cannot be reached; `workers/weights/pool_view.py` says what the pool has done meanwhile.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from titopool.errors import InvalidRequest, TitopoolError
from titopool.wire.commands import ApplyUpdate, BeginFolder, PauseMode, PrepareUpdate
from titopool.wire.pool_state import AdapterRecord, PoolWeights
from workers.engine.lora import Adapters
from workers.engine.weights import WeightEngine
from workers.ledger import digest_of_files
from workers.weights.checks import checked_folder
from workers.weights.pauses import Pauses
from workers.weights.pool_view import PoolView
from workers.weights.state import Phase
from workers.weights.updates import Updates

logger = logging.getLogger(__name__)

# Between two looks without news: at what could not be done before.
LOOK_EVERY_S = 1.0
# Of a folder that cannot be loaded although it is the right one: a file server may be away.
MAX_TRIES = 10


class CatchUp:
    """Compares what should be with what is, and does what is missing."""

    def __init__(
        self,
        pool: PoolView,
        updates: Updates,
        pauses: Pauses,
        *,
        engine: Callable[[], WeightEngine],
        adapters: Callable[[], Adapters],
        weights_root: str,
        on_changed: Callable[[], None],
    ):
        """`on_changed` is called when other adapters serve, and when weights are given up."""
        self._pool = pool
        self._updates = updates
        self._pauses = pauses
        self._engine = engine
        self._adapters = adapters
        self._weights_root = weights_root
        self._on_changed = on_changed
        self._news = asyncio.Event()
        # The weights that this worker cannot get.
        self._out_of_reach: tuple[int, str] = (0, "")
        # How often each of the pool's weights was tried.
        self._num_tries: Counter[tuple[int, str]] = Counter()
        # What the log says of each part already.
        self._complaints: dict[str, str] = {}
        # Adapters that could not be loaded, so that the log says so once.
        self._failed: set[tuple[str, int]] = set()

    @property
    def is_under_way(self) -> bool:
        """Whether this worker is about to have the weights that it lacks."""
        state, wanted = self._updates.state, self._pool.weights
        if state.update is not None and state.update.update_id == wanted.update_id:
            return state.phase in (Phase.PREPARED, Phase.APPLYING) or bool(state.update.folder)
        return bool(wanted.folder) and self._out_of_reach != wanted.order

    def notify(self) -> None:
        """There may be something to do."""
        self._news.set()

    async def run(self) -> None:
        """Catches up whenever there are news; never returns."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_EVERY_S)
            self._news.clear()
            if self._pool.is_started:
                await self.catch_up()

    async def catch_up(self) -> None:
        """Does what is missing now."""
        for part in (self._follow_pauses, self._follow_weights, self._follow_adapters):
            complaint = ""
            try:
                await part()
            except TitopoolError as error:
                complaint = error.message
                if complaint != self._complaints.get(part.__name__):
                    logger.warning("this worker is behind its pool: %s", complaint)
            except Exception:
                logger.exception("this worker could not catch up with its pool")
            self._complaints[part.__name__] = complaint

    async def _follow_pauses(self) -> None:
        await self._pauses.follow_pool(self._engine())

    async def _follow_weights(self) -> None:
        updates, state, wanted = self._updates, self._updates.state, self._pool.weights
        if not updates.lacks_weights:
            if state.weights.order != wanted.order and state.phase in (Phase.CLOSED, Phase.OPEN):
                state.accept_initial(wanted)
            return
        update = state.update
        if state.phase is Phase.PREPARED and update is not None:
            if update.update_id == wanted.update_id:
                # Another worker has applied it, so all had prepared it.
                await updates.apply(ApplyUpdate(update.update_id))
                await updates.steps.wait("apply", update.update_id)
            elif wanted.clock >= update.index:
                await updates.abort(update.update_id, "the pool has gone on without this worker")
        elif state.phase in (Phase.CLOSED, Phase.OPEN) and self._out_of_reach != wanted.order:
            if not wanted.folder:
                self._give_up("they came through a group")
            # A folder that is not there may come back with its file server.
            elif digest_of_files(wanted.folder) not in ("", wanted.files):
                self._give_up(f"{wanted.folder} has changed since")
            else:
                await self._try_folder()

    def _give_up(self, reason: str) -> None:
        wanted = self._pool.weights
        self._out_of_reach = wanted.order
        self._num_tries.clear()
        logger.warning(
            "the pool has weights of version %d, which this worker has not and cannot get: %s; it "
            "waits for the next update", wanted.version, reason,
        )  # fmt: skip
        self._on_changed()

    async def _try_folder(self) -> None:
        wanted, updates = self._pool.weights, self._updates
        self._num_tries[wanted.order] += 1
        try:
            await self._load_folder(wanted)
            self._num_tries.clear()
        except Exception as error:
            update = updates.state.update
            if update is not None and update.update_id == wanted.update_id:
                await updates.abort(update.update_id, "the folder could not be loaded")
            if self._num_tries[wanted.order] >= MAX_TRIES:
                self._give_up(str(error))
            raise

    async def _load_folder(self, wanted: PoolWeights) -> None:
        updates, update_id = self._updates, wanted.update_id
        policy: PauseMode = updates.kindest_policy
        if policy == "drain" and self._pauses.keeps_requests:
            # They would drain when the pause ends; a worker that gets no jobs has few.
            policy = "abort"
        action = BeginFolder(update_id, wanted.version, wanted.clock, wanted.folder)
        await updates.begin_folder(action, index=wanted.clock)
        await updates.prepare(PrepareUpdate(update_id, policy))
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
                    logger.warning("adapter %s is not here: %s", name, error.message)
                self._failed.add(key)
        if adapters.versions != before:
            self._on_changed()

    async def _load_adapter(self, name: str, record: AdapterRecord) -> None:
        adapters = self._adapters()
        if not adapters.is_loaded(name, record.version):
            folder = checked_folder(record.folder, self._weights_root, "lora_path")
            if digest_of_files(folder) != record.files:
                raise InvalidRequest(f"{folder} has changed since the adapter was loaded")
            await adapters.load(name, record.version, folder)
        adapters.switch(name, record.version)
