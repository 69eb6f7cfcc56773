"""Executes a worker's commands, and watches leases and deadlines between commands.

Runs in: each worker process, on its event loop. Talks to: `workers/weights` and the engine's LoRA
adapters. `workers/serving/server.py` receives the commands and sends the results.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from titopool.errors import Conflict, NoReadyWorker, TitopoolError
from titopool.settings.config import ServerConfig
from titopool.wire.commands import (
    AbortRequests,
    AbortUpdate,
    AcceptInitialWeights,
    Action,
    AnnounceTensors,
    ApplyUpdate,
    AwaitStep,
    BeginFolder,
    ClearCaches,
    Command,
    CommandDone,
    CountTokens,
    DropAdapter,
    EndTensors,
    FetchWeights,
    GatherRequests,
    GetStatus,
    JoinGroup,
    LeaveGroup,
    LoadAdapter,
    OfferWeights,
    Pause,
    PrepareUpdate,
    ReadChecksums,
    Resume,
    SetLabel,
    SwitchAdapter,
    TryConnections,
    UnloadAdapter,
)
from titopool.wire.distributions import Durations
from titopool.wire.messages import UpdateTotals
from titopool.wire.pool_state import PoolState, PoolWeights
from workers.engine.base import Engine
from workers.engine.weights import WeightEngine
from workers.ledger import Ledger
from workers.serving.catch_up import CatchUp
from workers.serving.connections import find_faults
from workers.serving.front_end_queues import FrontEndQueues
from workers.weights.checks import checked_folder
from workers.weights.list_trainer import ListTrainer
from workers.weights.pauses import Pauses
from workers.weights.peers import Peers
from workers.weights.pool_copy import PoolCopy
from workers.weights.state import Phase
from workers.weights.steps import Result
from workers.weights.tensor_trainer import TensorTrainer
from workers.weights.updates import Updates

logger = logging.getLogger(__name__)

# Between two looks at leases and deadlines.
WATCH_S = 0.25
# What some values of the setting `weight_staging` cost.
STAGING_COSTS = {
    "host": "generation is paused while new weights are copied over PCIe, also where the GPU has room "
    "for them; prefer auto",
    "in_place": "an update that fits neither beside the model nor into the KV cache is written into "
    "the model as it comes; if it fails, the worker restarts without its weights",
}


class Control:
    """The weight updates, pauses and LoRA adapters of one worker."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        worker_id: str,
        listen_address: str = "127.0.0.1",
        on_changed: Callable[[], None],
        on_broken: Callable[[str], None],
        front_ends: FrontEndQueues,
    ):
        """`on_changed` is called when other weights or adapters serve.

        `listen_address` is where other workers may read this one's weights.
        `on_broken` gets the reason when the model's weights are in an unknown state.
        """
        self._model = engine
        self._config = config
        self._on_changed = on_changed
        self._front_ends = front_ends
        self._worker_id = worker_id
        self._pool = PoolCopy(Ledger(config.run_dir, worker_id), self._on_pool_changed)
        self._pauses = Pauses(self._pool)
        self._updates = updates = Updates(
            lambda: self._engine, engine.versions, self._pauses, config, self._pool,
            on_applied=on_changed, on_broken=on_broken,
        )  # fmt: skip
        self._lists, self._tensors = ListTrainer(updates), TensorTrainer(updates)
        updates.trainers |= {"lists": self._lists, "tensors": self._tensors}
        self._peers = Peers(updates, listen_address)
        self._catch_up = CatchUp(
            self._pool, updates, self._pauses, engine=lambda: self._engine,
            adapters=lambda: engine.adapters, weights_root=config.weights_root,
            on_changed=on_changed,
        )  # fmt: skip
        # The socket identity of the front end that leads the commit.
        self._leader = b""
        self._methods: dict[type[Action], Callable[[Any], Awaitable[Result]]] = {
            JoinGroup: updates.join,
            BeginFolder: updates.begin_folder,
            AnnounceTensors: updates.announce,
            EndTensors: self._end_tensors,
            PrepareUpdate: updates.prepare,
            ApplyUpdate: updates.apply,
            ClearCaches: updates.clear_caches,
            SetLabel: self._set_label,
            ReadChecksums: self._read_checksums,
            AbortRequests: self._abort_requests,
            GatherRequests: self._gather_requests,
            CountTokens: self._count_tokens,
            TryConnections: self._try_connections,
            AbortUpdate: updates.abort,
            LeaveGroup: updates.leave,
            AcceptInitialWeights: updates.accept_initial,
            OfferWeights: self._peers.offer,
            FetchWeights: self._fetch_weights,
            AwaitStep: self._await_step,
            Pause: self._pause,
            Resume: self._resume,
            LoadAdapter: self._load_adapter,
            SwitchAdapter: self._switch_adapter,
            DropAdapter: self._drop_adapter,
            UnloadAdapter: self._unload_adapter,
            GetStatus: self._get_status,
        }

    @property
    def _engine(self) -> WeightEngine:
        return self._model.weights

    @property
    def phase(self) -> str:
        """`ready`, or why this worker gets no jobs although its engine is loaded."""
        if self._pauses.never_resumes:
            # Not "stale": if the pool has such workers only, requests fail instead of waiting.
            return "catching_up"
        if not self._updates.is_behind_pool:
            return "ready"
        if self._updates.is_fetching:
            return "fetching_weights"
        if self._catch_up.is_loading:
            return "catching_up"
        has_none = self.weights.is_initial or self._updates.state.has_unknown_weights
        return "waiting_for_weights" if has_none else "stale"

    @property
    def has_call_in_flight(self) -> bool:
        """Whether the engine may be busy with a weight update, which has its own timeout."""
        return self._updates.has_call_in_flight

    @property
    def has_open_update(self) -> bool:
        """Whether a weight update has begun and has not ended."""
        return not self._updates.state.is_resting

    @property
    def weights(self) -> PoolWeights:
        """The weights that this worker serves."""
        return self._updates.state.weights

    @property
    def update_totals(self) -> dict[str, UpdateTotals]:
        """What weight updates took, by staging."""
        return self._updates.totals

    @property
    def update_phases(self) -> dict[str, Durations]:
        """Steps of weight updates, by name."""
        return self._updates.phases

    @property
    def pauses(self) -> dict[str, Durations]:
        """Pauses that have ended, by mode."""
        return self._pauses.totals

    @property
    def adapters(self) -> dict[str, int]:
        """The version that serves of each LoRA adapter, by name."""
        return self._model.adapters.versions if self._pool.is_started else {}

    @property
    def pool(self) -> PoolState:
        """The pool's state as this worker knows it; empty until the engine is loaded."""
        return self._pool.state if self._pool.is_started else PoolState()

    def merge_pool_state(self, pool: PoolState) -> None:
        """Merges the pool's state as a front end knows it."""
        self._pool.merge(pool)

    def _on_pool_changed(self) -> None:
        self._catch_up.notify()

    # ---- commands --------------------------------------------------------------------

    async def answer(self, command: Command, identity: bytes = b"") -> CommandDone:
        """Executes a command of the front end `identity`; errors become part of the answer."""
        if isinstance(command.action, PrepareUpdate):
            self._leader = identity
        try:
            return CommandDone(command.command_id, await self._execute(command.action))
        except TitopoolError as error:
            return CommandDone(command.command_id, {}, error.code, error.message)
        except Exception as error:
            logger.exception("a command failed")
            text = (
                f"worker {self._worker_id} failed: {type(error).__name__}; its log has the reason"
            )
            return CommandDone(command.command_id, {}, TitopoolError.code, text)

    async def _execute(self, action: Action) -> Result:
        # A worker that loads has no requests, but prompts may wait for it. It can connect already.
        runs_early = isinstance(action, AbortRequests | TryConnections)
        if not self._pool.is_started and not runs_early:
            raise NoReadyWorker(
                f"worker {self._worker_id} is not ready yet; ask /ready and try again",
                retry_after_s=2,
            )
        return await self._methods[type(action)](action)

    async def _end_tensors(self, action: EndTensors) -> Result:
        ended = await self._lists.end_tensors(action)
        if action.is_last_call and ended["update_id"] is None:
            await self._tensors.start_to_finish()
        return ended

    async def _await_step(self, action: AwaitStep) -> Result:
        try:
            return await self._updates.steps.wait(action.step, action.target)
        except Conflict as error:
            raise Conflict(f"{error.message}; {self._updates.state.describe()}") from None

    async def _pause(self, action: Pause) -> Result:
        await self._pauses.pause(
            self._engine, action.mode, action.lease_s, action.clock, is_renewed=action.is_renewed
        )
        return {}

    async def _resume(self, action: Resume) -> Result:
        return {"was_paused": await self._pauses.resume(self._engine, action.clock)}

    async def _set_label(self, action: SetLabel) -> Result:
        self._pool.record_label(action.label, action.clock)
        self._on_changed()
        return {}

    async def _fetch_weights(self, action: FetchWeights) -> Result:
        if action.peers:
            result = await self._peers.fetch(action)
            self._catch_up.note_no_peer("")
            # Updates need not wait for this worker.
            self._on_changed()
            return result
        self._catch_up.note_no_peer(action.reason)
        return {}

    async def _read_checksums(self, action: ReadChecksums) -> Result:
        return {"checksums": await self._updates.parameter_digests()}

    async def _abort_requests(self, action: AbortRequests) -> Result:
        # First, so that a job on its way from a queue to this worker has arrived.
        ended, wanted = await self._front_ends.end_waiting(action.request_ids), action.request_ids
        num_running = 0
        if self._pool.is_started:
            if wanted is not None:
                wanted = [*wanted, *ended.others]
            num_running = await self._engine.abort_requests(wanted)
        return {"num_aborted": ended.num_jobs + num_running}

    async def _gather_requests(self, action: GatherRequests) -> Result:
        listed = await self._front_ends.list_requests(action.limit)
        return {
            "front_ends": [msgspec.to_builtins(one) for one in listed.front_ends],
            "num_missing": listed.num_missing,
        }

    async def _count_tokens(self, action: CountTokens) -> Result:
        if not self._pool.is_started:
            return {"tokens": {}}
        return {"tokens": self._engine.count_tokens(action.request_ids)}

    async def _try_connections(self, action: TryConnections) -> Result:
        return {"faults": await find_faults(action.endpoints, action.timeout_s)}

    async def _load_adapter(self, action: LoadAdapter) -> Result:
        folder = checked_folder(action.folder, self._config.weights_root, "lora_path")
        adapters = self._model.adapters
        files = await adapters.load(action.name, action.version, folder, action.files)
        return {"files": files}

    async def _switch_adapter(self, action: SwitchAdapter) -> Result:
        adapters = self._model.adapters
        adapters.switch(action.name, action.version)
        self._pool.record_adapter(action.name, adapters.record_of(action.name), action.clock)
        self._on_changed()
        return {"version": action.version}

    async def _drop_adapter(self, action: DropAdapter) -> Result:
        self._model.adapters.drop(action.name, action.version)
        return {}

    async def _unload_adapter(self, action: UnloadAdapter) -> Result:
        version = self._model.adapters.unload(action.name)
        self._pool.record_adapter(action.name, None, action.clock)
        self._on_changed()
        return {"version": version}

    async def _get_status(self, action: GetStatus) -> Result:
        return self.status()

    def status(self) -> Result:
        """The worker's entry in the answer of `GET /weights`."""
        state = self._updates.state
        return {
            "worker": self._worker_id,
            "state": state.phase,
            "session": state.session or None,
            "group_size": self._updates.group_size,
            "update": state.update.update_id if state.update else None,
            "weight_version": state.weights.version,
            "awaited": self._updates.awaited,
            "last_update": state.weights.update_id or None,
            "waits_for_weights": self._updates.is_behind_pool,
            "why_behind": self._catch_up.why_behind or None,
            "is_paused": self._pauses.lease_left_s is not None,
            "lease_left_s": self._pauses.lease_left_s,
            "last_end": state.last_end or None,
            "is_written_in_place": self._updates.is_in_model,
            "is_restarting": self._pauses.never_resumes,
            "last_staging": self._updates.staging or None,
            "last_update_s": round(self._updates.last_update_s, 4),
            "last_paused_s": round(self._updates.last_paused_s, 4),
            "adapters": self.adapters,
            "adapter_versions": self._model.adapters.latest_versions,
        }

    # ---- between commands ------------------------------------------------------------

    async def start(self, model: str) -> None:
        """Called when the engine has loaded `model`: reaches the pool's state before any job."""
        if cost := STAGING_COSTS.get(self._config.weight_staging):
            logger.warning("weight_staging=%s: %s", self._config.weight_staging, cost)
        self._pool.start(model)
        await self._catch_up.catch_up()

    async def before_job(self) -> None:
        """Commits a complete update whose end nobody says: the job needs the new weights."""
        group = self._updates.group
        if group is not None and group.calls == "tensors":
            await self._updates.trainer.finish()

    async def follow_pool(self) -> None:
        """Catches up with the pool; never returns."""
        await self._catch_up.run()

    async def watch(self) -> None:
        """Ends expired pauses, commits that nothing ends, and failed updates.

        Never returns.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._resume_if_due()
                await self._updates.check()
            except Exception:
                logger.exception("a look at leases and deadlines failed")

    async def _resume_if_due(self) -> None:
        if self._pauses.has_expired():
            logger.warning("pause lease expired; resuming generation")
            await self._pauses.expire(self._engine)
        updates = self._updates
        is_idle = updates.state.is_resting and not updates.steps.is_any_running
        if self._pauses.is_committing and is_idle and self._pauses.may_resume:
            logger.error("generation was still paused after a commit; resuming generation")
            await self._pauses.end_commit(self._engine)

    async def on_front_end_lost(self, identity: bytes) -> None:
        """Ends a commit whose leading front end is lost; the old weights keep serving.

        The front end may have told another worker to apply the update. In that case, this worker
        learns it from the other front ends within one heartbeat, long before `heartbeat_timeout_s`.
        """
        phase = self._updates.state.phase
        if identity == self._leader and phase in (Phase.PREPARING, Phase.PREPARED):
            await self._updates.end("the front end that led the commit is lost")
