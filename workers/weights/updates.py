"""Weight updates of one worker: accepts each step and runs it, whoever is the trainer.

Runs in: each worker process, on its event loop. Owns: the state (`workers/weights/state.py`). Talks
to: vLLM through `workers/engine/weights.py`. A failure before the model changes ends the group and
keeps the old weights. A failure after that restarts the worker. `Trainer` has what depends on
how a trainer calls: by name here, with lists in `list_trainer.py`, tensor by tensor in
`tensor_trainer.py`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from titopool.errors import (
    Conflict,
    DeadlinePassed,
    InvalidRequest,
    TitopoolError,
    WeightUpdateFailed,
)
from titopool.settings.config import ServerConfig
from titopool.wire.commands import (
    AbortUpdate,
    AcceptInitialWeights,
    AnnounceTensors,
    ApplyUpdate,
    BeginFolder,
    Calls,
    ClearCaches,
    JoinGroup,
    LeaveGroup,
    PrepareUpdate,
    TensorInfo,
)
from titopool.wire.distributions import Durations
from titopool.wire.messages import UpdateTotals
from titopool.wire.pool_state import CacheMode, PauseMode, PoolWeights, next_clock
from workers.engine.versions import Progress, Versions
from workers.engine.weights import WeightEngine
from workers.in_model.checkpoint_files import check_files
from workers.in_model.receiving.staging import STANDING, InKvCache, InPlace
from workers.weights.checks import (
    check_trainer_device,
    check_trainer_reachable,
    check_whole_layers,
    checked_folder,
    is_listening,
    wait_for_unused_port,
)
from workers.weights.engine_calls import EngineCalls
from workers.weights.pauses import Pauses
from workers.weights.pool_copy import PoolCopy
from workers.weights.state import Phase, WeightState
from workers.weights.steps import Result, Steps

logger = logging.getLogger(__name__)

IN_KV_CACHE, IN_PLACE = InKvCache.name, InPlace.name
BY_PAUSE = (*STANDING, "host", "beside")
# Phases in which the worker waits for others and no step runs that would notice a deadline.
WAITING = (Phase.RECEIVING, Phase.PREPARED)
# Phases in which the worker waits for the trainer or for other ranks.
IN_GROUP = (Phase.JOINING, Phase.RECEIVING, Phase.PREPARING)


class Updates:
    """Accepts one command at a time; long steps run as tasks (`steps`)."""

    def __init__(
        self,
        engine: Callable[[], WeightEngine],
        versions: Versions,
        pauses: Pauses,
        config: ServerConfig,
        pool: PoolCopy,
        *,
        on_applied: Callable[[], None],
        on_broken: Callable[[str], None],
    ):
        """`on_broken` gets the reason when the model's weights are in an unknown state."""
        self._engine_of = engine
        self.versions = versions
        self.pauses = pauses
        self.config = config
        self.pool = pool
        self._on_applied = on_applied
        self._on_broken = on_broken
        self.state = WeightState(timeout_s=config.weight_update_timeout_s)
        self.steps = Steps()
        self.accepting = asyncio.Lock()
        self._proves_each = config.weight_proof == "each"
        # Whether tensors may have overwritten keys and values that the caches still name.
        self._must_clear = False
        # Held while a step outside an update empties the caches.
        self._clearing = asyncio.Lock()
        self.call = EngineCalls(engine, config.weight_update_timeout_s, on_broken)
        # The clock of the weights that the update in progress may be a part of.
        self.base_clock = 0
        # The version of the pool's weights when that update began.
        self._base_version = 0
        # The last group that was joined, and whether its trainer listened when all ranks had joined.
        self.group: JoinGroup | None = None
        self.listens = False
        # How each kind of trainer sends.
        self.trainers: dict[Calls, Trainer] = {"named": Trainer(self)}
        # The tensors that calls have announced for the update in progress, by name.
        self.told: dict[str, TensorInfo] = {}
        # Such calls, and how the tensors of so many calls fit the model.
        self._num_told = 0
        self._fit: tuple[int, dict[str, Any]] = (-1, {})
        # What the update in progress is to do with the caches, and whether it has left requests in
        # flight their keys and values.
        self._cache: CacheMode = "clear"
        self._has_kept = False
        # Where the last update's tensors waited; "folder", or "" before the first tensor.
        self.staging = ""
        # Whether the update in progress is being written into the model, or has been.
        self.is_in_model = False
        # When the update in progress began (monotonic), and `Pauses.commits_s` then; None: there is
        # none.
        self._began: tuple[float, float] | None = None
        # Of the last update that was applied, in seconds: from its begin until the new weights served,
        # and how long generation was paused.
        self.last_update_s = self.last_paused_s = 0.0
        # What updates took, by staging.
        self.totals: dict[str, UpdateTotals] = {}
        # Steps of updates that have ended well: "receive" (from the begin until all tensors are
        # there), "prepare", "apply", and "pause" of generation, which overlaps with these.
        self.phases: dict[str, Durations] = {}

    @property
    def engine(self) -> WeightEngine:
        """The loaded engine."""
        return self._engine_of()

    @property
    def trainer(self) -> "Trainer":
        """Who sends in the session that is open; without one, a trainer that sends nothing."""
        return self.trainers[self.group.calls if self.group and self.state.session else "named"]

    @property
    def has_call_in_flight(self) -> bool:
        """Whether a call to vLLM's processes is in flight; each call has a timeout."""
        return self.call.num_in_flight > 0

    @property
    def is_behind_pool(self) -> bool:
        """Whether the worker lacks the pool's weights; it gets no jobs then."""
        return not self.state.weights.serves_as(self.pool.weights)

    @property
    def group_size(self) -> int | None:
        """Ranks of the group, with the trainer's; None: no group."""
        return self.group.world_size if self.group and self.state.session else None

    @property
    def default_pause_mode(self) -> PauseMode:
        """The mode that costs requests in flight least, for updates without a `policy`."""
        return "keep" if self.engine.can_keep else "drain"

    @property
    def catch_up_mode(self) -> PauseMode:
        """The mode in which a worker without the pool's weights takes these."""
        mode = self.default_pause_mode
        # Kept requests cannot drain. A worker without the pool's weights has few requests.
        return "abort" if mode == "drain" and self.pauses.keeps_requests else mode

    @property
    def awaited(self) -> Result | None:
        """What this worker's processes wait for in the group; None: nothing."""
        # While tensors are loaded in place, the processes cannot be asked.
        is_asked = self.state.phase in IN_GROUP and not self.is_in_model
        return self.call.awaited.shown if is_asked else None

    @property
    def is_fetching(self) -> bool:
        """Whether this worker takes another one's weights."""
        return self.staging == "peer" and self.state.is_apart

    @property
    def timeout_s(self) -> float:
        """The timeout of each step."""
        return self.config.weight_update_timeout_s

    # ---- the group -------------------------------------------------------------------

    async def join(self, action: JoinGroup) -> Result:
        """Accepts a session; `AwaitStep("join", session)` waits until all ranks have joined."""
        trainer = self.trainers[action.calls]
        if trainer.is_forming(action):
            return {"session": self.state.session}
        # Other workers may have an update that is complete here.
        await self.trainer.finish()
        async with self.accepting:
            takes_over = self.state.phase is not Phase.CLOSED
            takes_over = takes_over and await self.trainer.is_abandoned(action)
            self.state.join(action.session, time.monotonic(), takes_over=takes_over)
            if takes_over:
                logger.warning("session %s replaces a session without a trainer", action.session)
            self.call.awaited.observe([])
            self.group, self.listens = action, False
            try:
                if takes_over:
                    await self.release()
                self.check_not_broken()
                if not trainer.listens_later:
                    await trainer.check_address(action)
                check_trainer_device(action.device_uuid, await self.call("device"))
                if not trainer.listens_later:
                    await self._begin_to_join(action)
            except BaseException as error:
                await self.end(f"session {action.session} could not join: {error}")
                raise
            self.pauses.renew()
            trainer.begin_session()
            self.steps.start("join", action.session, self._run_join(action, trainer))
        return {"session": action.session}

    async def _begin_to_join(self, action: JoinGroup) -> None:
        await self.call("join", {**msgspec.structs.asdict(action), "timeout_s": self.timeout_s})

    async def _run_join(self, action: JoinGroup, trainer: "Trainer") -> Result:
        async with self.ends_on_failure(f"session {action.session} did not form"):
            if trainer.listens_later:
                await trainer.check_address(action)
                await self._begin_to_join(action)
            await self.call.wait_for_receivers(lambda status: bool(status["is_joined"]))
            self.state.joined(action.session, time.monotonic())
        self.listens = action.trainer_listens and await is_listening(action.host, action.port)
        return {}

    async def leave(self, action: LeaveGroup) -> Result:
        """Closes the group."""
        trainer = self.trainers[action.calls]
        if action.finishes:
            await trainer.finish()
        async with self.accepting:
            session = action.session
            if session is None:
                # A client may close its group twice: on request and when it exits.
                if not trainer.has_session:
                    return {}
                session = self.state.session
            trainer.check_leave()
            self.state.leave(session)
            if self.state.last_end:
                logger.warning("session %s has ended: %s", session, self.state.last_end)
            await self.release()
        return {}

    # ---- an update: begin ------------------------------------------------------------

    async def announce(self, action: AnnounceTensors) -> Result:
        """Begins an update, or receives more of its tensors."""
        async with self.accepting:
            return await self.trainers[action.calls].announce(action)

    async def begin_with(self, action: AnnounceTensors) -> Result:
        """Begins an update of these tensors, checks them and starts to receive them."""
        self.state.check_session("begin", action.session)
        self._check_pause_mode(action.policy or self.default_pause_mode)
        if action.is_partial:
            self.check_base(self._base_of(action))
        tensors = msgspec.msgpack.encode(action.tensors)
        async with self.ends_on_failure("the update did not begin", but_for=InvalidRequest):
            fits = await self.call(
                "begin", tensors, action.is_partial, self.chunk_bytes_of(action),
                self.config.weight_staging, "a checksum" if action.with_checksum else "",
                action.cache,
            )  # fmt: skip
        check_whole_layers(fits[0]["split_layers"])
        update = self.begin(action, action.session)
        self._fit, self.staging = (self._num_told, fits[0]), staging_of(fits)
        if self.staging in STANDING:
            policy = action.policy or self.default_pause_mode
            self.steps.start(*stop_step(update.update_id), self._run_stop(policy))
        kept = {name: fits[0][name] for name in ("missing", "ignored", "kept")}
        return {**self.begun(update), "staging": self.staging, **kept}

    def chunk_bytes_of(self, action: AnnounceTensors) -> int:
        """Bytes of the chunks in which the tensors come; 0: one broadcast for each tensor."""
        assert self.group is not None
        is_packed = self.group.packed if action.packed is None else action.packed
        size = self.group.packed_bytes if action.packed_bytes is None else action.packed_bytes
        return size if is_packed else 0

    def begin(self, action: AnnounceTensors, session: str) -> PoolWeights:
        """Begins an update whose tensors come from the group of `session`."""
        self.base_clock = self._base_of(action)
        update = self.new_update(action)
        self.state.begin(session, update, time.monotonic())
        return update

    def begun(self, update: PoolWeights) -> Result:
        """What the other workers must know of an update that the first one has accepted."""
        return {
            "session": self.state.session, "update_id": update.update_id,
            "version": update.version, "clock": update.clock - 1, "base_clock": self.base_clock,
        }  # fmt: skip

    async def _run_stop(self, policy: PauseMode) -> Result:
        """Stops generation, so that the tensors can arrive in the KV cache's memory or the model."""
        async with self.ends_on_failure("generation did not stop for the update"):
            await self.stop_generation(policy, receives=True)
        async with self.ends_on_failure("the weights were not loaded"):
            await self.load_in_place()
        return {}

    async def load_in_place(self) -> None:
        """Loads the tensors as they come, if they are to go in place."""
        if self.staging == IN_PLACE:
            # Until then the model is as it was.
            await self.call.wait_for_receivers(lambda status: status["num_received"] > 0)
            self.is_in_model = True
            await self.call("load")

    async def stop_generation(self, policy: PauseMode, *, receives: bool = False) -> None:
        """Pauses generation and clears the caches, unless that was done for this update.

        Args:
            receives: begins to receive planned tensors once generation stands. They may overwrite
                what the caches name, so until these are clear generation must not resume.
        """
        # Generation resumes at the end of another step that empties the caches.
        async with self._clearing:
            is_new = not self.pauses.is_committing
            if is_new:
                self._check_pause_mode(policy)
                await self.pauses.begin_commit(self.engine, policy)
        if receives:
            self._must_clear |= is_new
            # With many requests in flight, clearing the caches takes as long as a transfer.
            await self.call("receive")
        if is_new:
            # Without requests that go on nobody needs the old ones.
            self._has_kept = (
                self._cache != "clear" and policy == "keep" and self.staging not in STANDING
            )
            await (self.engine.keep_keys() if self._has_kept else self.engine.clear_caches())
            self._must_clear = False

    async def set_aside(self) -> None:
        """Resumes generation while the trainer may take its time for the rest of a layer."""
        if self.staging == IN_KV_CACHE and all(await self.call("set_aside")):
            await self.pauses.end_commit(self.engine)

    async def take(self, tensors: list[TensorInfo], chunk_bytes: int, not_in_place: str) -> None:
        """Checks tensors of an update and starts to receive them."""
        answers = await self.call(
            "take", msgspec.msgpack.encode(tensors), chunk_bytes, self.config.weight_staging,
            not_in_place, self._cache,
        )  # fmt: skip
        # One list may fit beside the model and another one not.
        before = [{"staging": self.staging}] if self.staging else []
        self.staging = staging_of([*answers, *before])
        if staging_of(answers) in STANDING:
            await self.stop_generation(self.default_pause_mode, receives=True)
        self.told |= {one.name: one for one in tensors}
        self._num_told += 1

    async def begin_folder(self, action: BeginFolder, *, clock: int | None = None) -> Result:
        """Checks the folder's tensors; `clock` is given for weights that the pool has already.

        Raises:
            Conflict: an update is in progress, or the folder has other files than `action` says.
            InvalidRequest: the folder is not below `weights_root`, or does not fit the model.
        """
        folder = checked_folder(action.folder, self.config.weights_root)
        async with self.accepting:
            self.state.check_resting("update_weights")
            files = await check_files(folder, action.files)
            (fit, *_) = await self.call("check_folder", folder)
            update = self.new_update(action, folder, files, clock)
            self.state.begin_apart("update_weights", update, time.monotonic())
            if action.label:
                self.state.set_label(action.label)
            self.pauses.renew()
        return {"version": update.version, "clock": update.clock - 1, "files": files, **fit}

    def new_update(
        self,
        action: AnnounceTensors | BeginFolder,
        folder: str = "",
        files: str = "",
        clock: int | None = None,
    ) -> PoolWeights:
        """The weights of an update that begins now."""
        self.begin_clock()
        self._base_version = self.pool.weights.version
        self.staging = "folder" if folder else ""
        self._cache, self._has_kept = action.cache, False
        self.told, self._num_told, self._fit = {}, 0, (-1, {})
        if clock is None:
            clock = next_clock(max(self.pool.weights.clock, action.clock))
        version = self.pool.weights.version + 1 if action.version is None else action.version
        return PoolWeights(clock, action.update_id, version, False, folder, files)

    def _base_of(self, action: AnnounceTensors) -> int:
        """The clock of the pool's last weights, as far as the first worker and the front end know.

        It is not always the update's clock less one: the first change has the time of day.
        """
        if action.base_clock is not None:
            return action.base_clock
        return max(self.pool.weights.clock, action.clock)

    def check_base(self, clock: int) -> None:
        """Raises Conflict for a partial update to a worker that lacks the pool's weights."""
        if self.is_behind_pool or clock > self.state.weights.clock:
            raise Conflict(
                "a partial update needs the pool's last weights, which this worker lost in a "
                "restart; send a complete update"
            )

    # ---- an update: prepare ----------------------------------------------------------

    async def prepare(self, action: PrepareUpdate) -> Result:
        """Accepts a commit; `AwaitStep("prepare", update)` waits until it can be applied."""
        async with self.accepting:
            self.trainer.check_prepare(action.update_id)
            self._check_pause_mode(action.policy or self.default_pause_mode)
            if self.staging == IN_PLACE and (action.with_checksum or action.checksum is not None):
                raise InvalidRequest(
                    "checksum: expected none for an update in place, which keeps no tensors; commit "
                    "without it, or announce it to /weights/begin, which then refuses the update",
                    param="checksum",
                )
            update = self.state.prepare(action.update_id, time.monotonic())
            self.pauses.renew()
            self.steps.start("prepare", action.update_id, self.run_prepare(action, update))
        return {}

    def _check_pause_mode(self, mode: PauseMode) -> None:
        if mode == "keep" and not self.engine.can_keep:
            raise InvalidRequest(
                "policy: expected drain or abort, got keep, with which this version of vLLM loses "
                "the images of requests in flight",
                param="policy",
            )
        self.pauses.check_mode(mode)

    async def run_prepare(self, action: PrepareUpdate, update: PoolWeights) -> Result:
        """Waits for all tensors, pauses generation and clears the caches."""
        async with self.ends_on_failure("the update cannot be committed"):
            result = {} if update.folder else await self._await_tensors(action)
            begin = time.monotonic()
            await self.stop_generation(action.policy or self.default_pause_mode)
            if update.folder:
                # The last look at which the model has the old weights.
                await check_files(update.folder, update.files)
            self.state.prepared(update.update_id, time.monotonic())
            self._count_phase("prepare", time.monotonic() - begin)
        return result

    def _count_phase(self, name: str, seconds: float) -> None:
        self.phases.setdefault(name, Durations()).add(seconds)

    async def _await_tensors(self, action: PrepareUpdate) -> Result:
        if self.steps.has_started(*stop_step(action.update_id)):
            await self.steps.wait(*stop_step(action.update_id))
        await self.call.wait_for_receivers(lambda s: s["num_received"] == s["num_announced"])
        if self._began is not None:
            self._count_phase("receive", time.monotonic() - self._began[0])
        self.pauses.renew()
        fit = await self.fit()
        check_whole_layers(fit["split_layers"])
        if fit["missing"]:
            self.check_base(self.base_clock)
        if fit["ignored"]:
            # A head that is tied to the embedding is not loaded.
            await self.call("compare_heads")
        if not action.with_checksum and action.checksum is None:
            return {}
        found: set[str] = set(await self.call("checksum"))
        if len(found) > 1 or (action.checksum is not None and found != {action.checksum}):
            raise WeightUpdateFailed(
                f"checksum: expected {action.checksum or 'the same in all processes'}, got "
                f"{', '.join(sorted(found))}; the tensors were changed in transit"
            )
        return {"checksum": found.pop()}

    async def fit(self) -> dict[str, Any]:
        """How the update's tensors fit the model: names that are `missing` or `ignored`, and
        `split_layers`."""
        return await self.fit_of(self.told.values(), self._num_told)

    async def fit_of(self, tensors: Iterable[TensorInfo], num_told: int) -> dict[str, Any]:
        """As `fit`, of the tensors of the first `num_told` calls."""
        if self._fit[0] != num_told:
            (fit, *_) = await self.call("check", msgspec.msgpack.encode(list(tensors)), True)
            self._fit = num_told, fit
        return self._fit[1]

    # ---- an update: apply or abort ---------------------------------------------------

    async def apply(self, action: ApplyUpdate) -> Result:
        """Begins to change the model; `AwaitStep("apply", update)` waits for the end.

        A repeated call does nothing: the command and another front end's `Hello` may both apply.
        """
        async with self.accepting:
            if not self.steps.has_started("apply", action.update_id):
                update = self.state.apply(action.update_id, time.monotonic())
                self.pauses.renew()
                self.steps.start("apply", action.update_id, self.run_apply(update))
        return {}

    async def run_apply(self, update: PoolWeights) -> Result:
        """Loads the tensors into the model and resumes generation."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s):
                # Outputs from before the pause may still arrive while the tensors are loaded.
                progress, (result, *_) = await asyncio.gather(
                    self.engine.progress(), self.call("apply", self._proves_each)
                )
                if update.folder:
                    # What was read while somebody wrote is of two checkpoints.
                    await check_files(update.folder, update.files)
        except Exception as error:
            reason = f"weights were left half loaded: {type(error).__name__} {error}".strip()
            logger.exception("version %d could not be loaded", update.version)
            self._count(is_applied=False)
            self._on_broken(reason)
            raise WeightUpdateFailed(f"{reason}; the worker restarts") from error
        self.state.applied(update.update_id, time.monotonic())
        self._count_phase("apply", time.monotonic() - begin)
        await self.serve(update, progress)
        return {
            "version": update.version, "previous_version": self._base_version, **result,
            "staging": self.staging, "cache": "keep" if self._has_kept else "clear",
            "update_s": round(self.last_update_s, 4), "paused_s": round(self.last_paused_s, 4),
        }  # fmt: skip

    async def serve(self, update: PoolWeights, progress: Progress) -> None:
        """Records new weights that the model has, and resumes generation."""
        self.pool.record_weights(update)
        logger.info("serving weights of version %d (staging: %s)", update.version, self.staging)
        self.versions.switch(update.version, progress)
        self._cache = "clear"
        self.is_in_model = self.pauses.is_held = False
        try:
            await self.pauses.end_commit(self.engine)
        finally:
            # A new group may cancel this step once the weights are applied.
            self._count(is_applied=True)
            self._on_applied()

    def forget_begin(self) -> None:
        """The update in progress has ended without tensors, and counts nowhere."""
        self._began = None

    def begin_clock(self) -> None:
        """Begins the times of an update."""
        self._began = (time.monotonic(), self.pauses.commits_s)

    def _count(self, *, is_applied: bool) -> None:
        """Counts the end of the update in progress, if there is one."""
        began, self._began = self._began, None
        if began is None:
            return
        totals = self.totals.setdefault(self.staging or "none", UpdateTotals())
        if is_applied:
            totals.num_applied += 1
            self.last_update_s = totals.update_s = time.monotonic() - began[0]
            self.last_paused_s = totals.paused_s = self.pauses.commits_s - began[1]
            self._count_phase("pause", totals.paused_s)
        else:
            totals.num_failed += 1

    async def abort(self, action: AbortUpdate) -> Result:
        """Aborts an update, unless it is applied or being applied: the result says which."""
        update = self.state.update
        if self.is_fetching and update is not None and update.update_id == action.update_id:
            # What this worker fetches is applied elsewhere.
            return {"is_applied": True}
        async with self.accepting:
            update_id = action.update_id
            if update_id is None:
                update = self.trainers[action.calls].update
                update_id = update.update_id if update else "in progress"
            if self.state.has_applied(update_id):
                return {"is_applied": True}
            keeps_group = not action.leaves and self.trainer.keeps_group
            self.state.abort(update_id, action.reason, keeps_group=keeps_group)
            await self.release()
        return {"is_applied": False}

    def return_to_initial(self) -> None:
        """Restarts this worker for the model's own weights, which the pool has accepted."""
        self._on_broken("the pool returns to the model's own weights")

    async def accept_initial(self, action: AcceptInitialWeights) -> Result:
        """Makes the initial weights the pool's; a worker that has other weights restarts."""
        async with self.accepting:
            if not self.is_behind_pool:
                raise Conflict(
                    f"accept: expected a pool whose weights are lost; {self.state.describe()}"
                )
            self.state.check_resting("accept")
            weights = PoolWeights(action.clock, action.update_id)
            self.pool.record_weights(weights)
            restarts = not self.state.weights.is_initial
            if restarts:
                self.return_to_initial()
            else:
                self.state.accept_initial(weights)
            # Before this worker stops, too: it may be the only one that knows.
            self._on_applied()
        return {"restarts": restarts}

    # ---- outside an update -----------------------------------------------------------

    async def clear_caches(self, action: ClearCaches) -> Result:
        """Starts to empty the caches; `AwaitStep("clear", name)` waits for the end."""
        self.steps.start("clear", action.name, self.run_clear())
        return {}

    async def run_clear(self) -> Result:
        """Empties the caches, unless they are held for new weights."""
        if self.pauses.is_held:
            # They are clear, and stay so until new weights are complete.
            return {}
        try:
            async with asyncio.timeout(self.timeout_s):
                while not await self._pause_and_clear():
                    await self.pauses.wait_for_commit()
                    if not self._has_kept:
                        # The commit has emptied the caches before the model changed.
                        break
        except TimeoutError:
            raise DeadlinePassed(
                f"the caches were not emptied within {self.timeout_s:g} s "
                "(weight_update_timeout_s); ask /weights for the state and try again"
            ) from None
        return {}

    async def _pause_and_clear(self) -> bool:
        """Empties the caches; False: a commit is in progress."""
        async with self._clearing:
            if self.pauses.is_committing:
                return False
            # Generation is paused, as a step in between could use an entry that is being cleared.
            await self.pauses.begin_commit(self.engine, self.default_pause_mode)
            try:
                await self.engine.clear_caches()
            finally:
                await self.pauses.end_commit(self.engine)
        return True

    async def parameter_digests(self) -> dict[str, str]:
        """A digest of each parameter, under the names of vLLM's `compute_weight_checksums`.

        Raises:
            InvalidRequest: this version of vLLM has none.
            DeadlinePassed: the digests took longer than the timeout of a step.
        """
        try:
            return {
                name: digest
                for digests in await self.call("digests")
                for name, digest in digests.items()
            }
        except TimeoutError:
            raise DeadlinePassed(
                f"the parameters were not read within {self.timeout_s:g} s "
                "(weight_update_timeout_s); raise it"
            ) from None

    # ---- deadlines and failures ------------------------------------------------------

    async def check(self) -> None:
        """Ends an update whose deadline has passed, whose receiver failed or whose trainer is gone."""
        try:
            # A fetch, and a step that receives, end the update when their own deadline passes.
            has_deadline = self.is_fetching or self.trainer.is_receiving_list
            waits = self.state.phase in WAITING and not has_deadline
            if waits and self.state.has_expired(time.monotonic()):
                await self.end(
                    f"{self.state.phase} for more than {self.timeout_s:g} s "
                    f"(weight_update_timeout_s){self.call.awaited.reason}"
                )
            elif self.state.is_receiving_tensors:
                await self.trainer.look()
        except TitopoolError as error:
            if self.state.phase in WAITING:
                await self.end(error.message)

    @asynccontextmanager
    async def ends_on_failure(
        self,
        what: str,
        *,
        but_for: type[TitopoolError] | tuple[()] = (),
        keeps_group: bool | None = None,
    ) -> AsyncIterator[None]:
        """Runs a step within the timeout; a failure ends the update and the group.

        `what` begins the reason. Errors of the type `but_for` end nothing. For `keeps_group` see
        `end`.

        Raises:
            DeadlinePassed: the step did not end within the timeout.
            WeightUpdateFailed: the step raised an error that is not a TitopoolError.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except but_for:
            raise
        except TimeoutError:
            reason = f"{what}: not within {self.timeout_s:g} s (weight_update_timeout_s)"
            reason += self.call.awaited.reason
            await self.end(reason, keeps_group=keeps_group)
            raise DeadlinePassed(reason) from None
        except TitopoolError as error:
            await self.end(f"{what}: {error.message}", keeps_group=keeps_group)
            raise
        except Exception as error:
            await self.end(f"{what}: {error!r}", keeps_group=keeps_group)
            raise WeightUpdateFailed(f"{what}: {error!r}") from error

    async def end(self, reason: str, *, keeps_group: bool | None = None) -> None:
        """Ends the update and its group; the weights stay as they are.

        Does nothing while the model changes.

        Args:
            keeps_group: whether the group stays; None: if it can be used again.
        """
        if self.state.phase is Phase.APPLYING:
            return
        if self.state.phase is not Phase.CLOSED:
            keeps = self.trainer.keeps_group if keeps_group is None else keeps_group
            self.state.end(reason, keeps_group=keeps)
        logger.warning("a weight update or its group has ended: %s", reason)
        await self.release()

    async def release(self) -> None:
        """After the end of an update or a group: releases receivers and steps, and resumes."""
        self.steps.cancel()
        self.call.awaited.observe([])
        self._count(is_applied=False)
        self._cache = "clear"
        if self.is_in_model:
            # A part of the model may be new; or all of it, and other workers have older weights.
            self._break(f"an update in place has ended: {self.state.last_end}")
            return
        try:
            await self.call("drop", self.state.phase is Phase.CLOSED)
            if self._must_clear:
                async with asyncio.timeout(self.timeout_s):
                    await self.engine.clear_caches()
                self._must_clear = False
        except BaseException as error:
            stands = self.staging in STANDING and self.pauses.is_committing
            if stands and (self._must_clear or isinstance(error, Exception)):
                # The trainer's bytes may still arrive there: only a new process may generate.
                self._break(f"the KV cache could not be cleared: {error!r}")
                raise
            await self.pauses.end_commit(self.engine)
            raise
        await self.pauses.end_commit(self.engine)

    def _break(self, reason: str) -> None:
        """Ends the worker; generation stands until then."""
        self.pauses.never_resumes = True
        self._on_broken(reason)

    def check_not_broken(self) -> None:
        """Raises WeightUpdateFailed while the worker ends."""
        if self.pauses.never_resumes:
            raise WeightUpdateFailed("this worker restarts; ask /ready and try again")


class Trainer:
    """How a trainer sends whose calls are "named" (`titopool/wire/commands.py`): titopool's client."""

    # Whether the trainer begins to listen after its call.
    listens_later = False

    def __init__(self, updates: Updates):
        self.updates, self.state, self.steps = updates, updates.state, updates.steps

    @property
    def has_session(self) -> bool:
        """Whether the session is that of such a trainer."""
        return bool(self.state.session) and self.updates.trainer is self

    @property
    def update(self) -> PoolWeights | None:
        """The update that such a trainer sends and that is received; not an update from a folder."""
        sends = self.has_session and self.state.is_receiving_tensors
        return self.state.update if sends else None

    @property
    def is_receiving_list(self) -> bool:
        """Whether a list is being received, by a step with its own deadline."""
        return False

    @property
    def keeps_group(self) -> bool:
        """Whether the group can be used after an update that failed now."""
        return False

    def is_forming(self, action: JoinGroup) -> bool:
        """Whether `action` repeats the call of the group that forms."""
        return False

    async def finish(self) -> None:
        """Commits a complete update whose end nobody says, and waits for the end."""

    def check_leave(self) -> None:
        """Raises Conflict if the trainer must end its update first."""

    def begin_session(self) -> None:
        """Called when a session was accepted."""

    async def check_address(self, action: JoinGroup) -> None:
        """Raises InvalidRequest if the workers cannot meet the trainer at the group's address."""
        if action.trainer_listens:
            await check_trainer_reachable(action.host, action.port)
        elif action.worker_listens:
            await wait_for_unused_port(action.host, action.port)

    async def is_abandoned(self, newcomer: JoinGroup | None = None) -> bool:
        """Whether the session has lost its trainer, as far as `newcomer` may tell."""
        updates = self.updates
        group = updates.group
        if group is None:
            return True
        # One whose store took no connection after the join is not gone because it takes none.
        if group.trainer_listens if newcomer else updates.listens:
            return not await is_listening(group.host, group.port)
        # A trainer with an NCCL id and TRL's client do not listen. A new one on the same GPU
        # replaces the old one at once, any other one only after the old one was idle for the
        # timeout of a step.
        is_same_gpu = newcomer is not None and group.device_uuid == newcomer.device_uuid != ""
        return is_same_gpu or self.state.idle_s(time.monotonic()) > updates.timeout_s

    async def announce(self, action: AnnounceTensors) -> Result:
        """Called for an announcement; the caller has the lock."""
        return await self.updates.begin_with(action)

    def check_prepare(self, update_id: str) -> None:
        """Raises Conflict if the update has not ended."""

    async def look(self) -> None:
        """Ends an update whose receiver failed or whose trainer is gone; called while it receives."""
        updates = self.updates
        # While the model loads in place, the call would wait; the step that receives a list asks itself.
        if not updates.is_in_model and not self.is_receiving_list:
            await updates.call.receiver_statuses()
        update, group = self.state.update, updates.group
        if group is None or not updates.listens or await is_listening(group.host, group.port):
            return
        # The attempt to connect takes up to 2 s: in that time, the update may have ended.
        if self.state.is_receiving_tensors and self.state.update is update:
            await updates.end("the trainer is gone", keeps_group=False)


def stop_step(update_id: str) -> tuple[str, str]:
    """The name of the step that stops generation before an update's tensors arrive."""
    return "stop", update_id


def staging_of(answers: list[dict[str, Any]]) -> str:
    """The staging of a worker from those of its processes: the one that governs its pause."""
    names = {one["staging"] for one in answers}
    return next(one for one in BY_PAUSE if one in names)
