"""A worker's part in weight updates, step by step.

Runs in: each worker process, on its loop. Owns: the state (`workers/weights/state.py`). Talks to:
the engine beside it (`workers/engine/weights.py`). Whatever fails before the model changes ends the
communicator and leaves the old weights serving; what fails after it ends the worker.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from titopool.errors import Conflict, InvalidRequest, TitopoolError, WeightUpdateFailed
from titopool.settings.config import ServerConfig
from titopool.wire.commands import (
    AcceptInitialWeights,
    ApplyUpdate,
    BeginFolder,
    BeginUpdate,
    JoinGroup,
    PauseMode,
    PrepareUpdate,
    TensorInfo,
)
from titopool.wire.pool_state import PoolWeights, next_clock
from workers.engine.versions import Versions
from workers.engine.weights import WeightEngine
from workers.ledger import digest_of_files
from workers.weights.calls import Calls
from workers.weights.checks import (
    EndsOnError,
    checked_folder,
    refuse_keeping,
    refuse_own_device,
    refuse_split_layers,
    refuse_what_is_out_of_reach,
)
from workers.weights.liveness import answers
from workers.weights.pauses import Pauses
from workers.weights.pool_view import PoolView
from workers.weights.state import Phase, Update, WeightState
from workers.weights.steps import Result, Steps

logger = logging.getLogger(__name__)


class Updates:
    """Receives, checks and applies; one action at a time is accepted."""

    def __init__(
        self,
        engine: Callable[[], WeightEngine],
        versions: Versions,
        pauses: Pauses,
        config: ServerConfig,
        pool: PoolView,
        *,
        on_applied: Callable[[], None],
        on_broken: Callable[[str], None],
    ):
        """`on_broken` gets the reason when nobody knows which weights the model has."""
        self._engine_of = engine
        self._versions = versions
        self._pauses = pauses
        self._config = config
        self._pool = pool
        self._on_applied = on_applied
        self._on_broken = on_broken
        self.state = WeightState(timeout_s=config.weight_update_timeout_s)
        self.steps = Steps()
        self._accepting = asyncio.Lock()
        self._call = Calls(engine, config.weight_update_timeout_s, on_broken)
        self.joined: JoinGroup | None = None
        # Of an update of TRL's client, by name.
        self.announced: dict[str, TensorInfo] = {}

    @property
    def _engine(self) -> WeightEngine:
        return self._engine_of()

    async def receiving(self) -> list[dict[str, Any]]:
        """How far the receiver of each process is; see `Calls.receiving`."""
        return await self._call.receiving()

    @property
    def is_in_a_call(self) -> bool:
        """Whether the engine may be busy with weights, for which there is a deadline."""
        return self._call.num_active > 0

    @property
    def lacks_weights(self) -> bool:
        """Whether the pool has had weights that this worker has not: nothing is served."""
        return not self.state.weights.serves_as(self._pool.weights)

    @property
    def kindest_policy(self) -> PauseMode:
        """What costs requests in flight least, for updates whose trainer names no policy."""
        return "keep" if self._engine.can_keep else "drain"

    @property
    def timeout_s(self) -> float:
        """The deadline of each step."""
        return self._config.weight_update_timeout_s

    # ---- the communicator ------------------------------------------------------------

    async def join(self, action: JoinGroup) -> Result:
        """Accepts a session; `AwaitStep("join", session)` tells when it is open."""
        async with self._accepting:
            takes_over = self.state.phase is not Phase.CLOSED and await self._is_left(action)
            had_one = self.state.phase is not Phase.CLOSED
            self.state.join(
                action.session, action.protocol, time.monotonic(), takes_over=takes_over
            )
            if had_one:
                logger.warning("session %s takes over from one that is left", action.session)
            self.steps.cancel()
            self.joined, self.announced = action, {}
            try:
                await self._pauses.end_commit(self._engine)
                if action.protocol == "titopool":
                    await refuse_what_is_out_of_reach(action.host, action.port)
                refuse_own_device(action.device_uuid, await self._call("device"))
                await self._call("join", self._group_args(action))
            except BaseException as error:
                await self.end(f"session {action.session} could not join: {error}")
                raise
            self.steps.start("join", action.session, self._finish_join(action.session))
        return {}

    def _group_args(self, action: JoinGroup) -> dict[str, Any]:
        return {
            "protocol": action.protocol, "backend": action.backend, "host": action.host,
            "port": action.port, "rank": action.rank, "world_size": action.world_size,
            "timeout_s": self.timeout_s,
        }  # fmt: skip

    async def _is_left(self, newcomer: JoinGroup) -> bool:
        """Whether the session that is there has lost its trainer."""
        there = self.joined
        if there is None:
            return True
        if there.protocol == "titopool":
            return not await answers(there.host, there.port)
        # TRL's client leaves no trace when it dies: one on the same GPU takes its place at once,
        # another when nothing has happened for the time that a step may take.
        is_same = there.device_uuid == newcomer.device_uuid != ""
        return is_same or self.state.idle_s(time.monotonic()) > self.timeout_s

    async def _finish_join(self, session: str) -> Result:
        async with self._ends_on_error(f"session {session} did not form"):
            await self._call.poll(lambda status: bool(status["is_joined"]))
            self.state.joined(session, time.monotonic())
        return {}

    async def leave(self, session: str | None) -> Result:
        """Closes the communicator."""
        async with self._accepting:
            if session is None:
                # TRL's client closes when it is asked to, and again at its end.
                if self.state.protocol != "trl":
                    return {}
                session = self.state.session
            self.state.leave(session)
            if self.state.last_end:
                logger.warning("session %s has ended: %s", session, self.state.last_end)
            await self._clean_up()
        return {}

    # ---- an update -------------------------------------------------------------------

    async def begin(self, action: BeginUpdate) -> Result:
        """Checks the tensors and begins to receive them."""
        async with self._accepting:
            self.state.check_session("begin", action.session)
            if action.is_partial:
                self._check_base(action.clock)
            tensors = msgspec.msgpack.encode(action.tensors)
            async with self._ends_on_error("the update did not begin", but_for=InvalidRequest):
                (fit, *_) = await self._call(
                    "begin", tensors, action.is_partial, action.bucket_bytes
                )
            refuse_split_layers(fit.pop("split_layers"))
            update = self._update(action.update_id, action.version, action.clock)
            self.state.begin(action.session, update, time.monotonic())
        return {"version": update.version, "clock": update.index - 1, **fit}

    async def begin_folder(self, action: BeginFolder, *, index: int | None = None) -> Result:
        """Checks what the folder holds; with `index` it is an update that the pool has had."""
        folder = checked_folder(action.folder, self._config.weights_root)
        async with self._accepting:
            self.state.check_resting("update_weights")
            files = digest_of_files(folder)
            (fit, *_) = await self._call("check_folder", folder)
            update = self._update(action.update_id, action.version, action.clock, folder, files)
            if index is not None:
                update = dataclasses.replace(update, index=index)
            self.state.begin_folder(update, time.monotonic())
        return {"version": update.version, "clock": update.index - 1, **fit}

    def _update(
        self,
        update_id: str,
        version: int | None,
        clock: int,
        folder: str = "",
        files: str = "",
    ) -> Update:
        version = self._pool.weights.version + 1 if version is None else version
        index = next_clock(max(self._pool.weights.clock, clock))
        return Update(update_id, version, index, folder, files)

    def _check_base(self, clock: int) -> None:
        """A part of new weights fits only the weights that the pool has."""
        if self.lacks_weights or clock > self.state.weights.clock:
            raise Conflict(
                "this worker was started again and has none of the weights that the others have; "
                "send a complete update"
            )

    async def prepare(self, action: PrepareUpdate) -> Result:
        """Accepts a commit; `AwaitStep("prepare", update)` tells when it may be applied."""
        async with self._accepting:
            self._check_policy(action.policy)
            update = self.state.prepare(action.update_id, time.monotonic())
            self.steps.start("prepare", action.update_id, self.finish_prepare(action, update))
        return {}

    def _check_policy(self, policy: PauseMode) -> None:
        if not self._engine.can_keep:
            refuse_keeping(policy)
        self._pauses.check(policy)

    async def finish_prepare(self, action: PrepareUpdate, update: Update) -> Result:
        """All of a prepare but its acceptance."""
        result: Result = {}
        async with self._ends_on_error("the update cannot be committed"):
            if not update.folder:
                await self._call.poll(lambda s: s["num_received"] == s["num_announced"])
                await self._check_received()
                if action.with_checksum or action.checksum is not None:
                    result["checksum"] = await self._checksum(action.checksum)
            await self._pauses.begin_commit(self._engine, action.policy)
            await self._engine.clear_caches()
            self.state.prepared(update.update_id, time.monotonic())
        return result

    async def _check_received(self) -> None:
        """What `begin` could not check."""

    async def _checksum(self, expected: str | None) -> str:
        found: set[str] = set(await self._call("checksum"))
        if len(found) > 1 or (expected is not None and found != {expected}):
            raise WeightUpdateFailed(
                f"checksum: expected {expected or 'the same in all processes'}, got "
                f"{', '.join(sorted(found))}; the tensors were changed on their way"
            )
        return found.pop()

    async def apply(self, action: ApplyUpdate) -> Result:
        """Begins to change the model; `AwaitStep("apply", update)` tells the end.

        Does nothing when it has begun already: another front end may have told of it first.
        """
        async with self._accepting:
            if not self.steps.is_known("apply", action.update_id):
                update = self.state.apply(action.update_id, time.monotonic())
                self.steps.start("apply", action.update_id, self.finish_apply(update))
        return {}

    async def finish_apply(self, update: Update) -> Result:
        """All of an apply but its acceptance."""
        try:
            async with asyncio.timeout(self.timeout_s):
                progress = await self._engine.progress()
                (result, *_) = await self._call("apply")
        except Exception as error:
            reason = f"weights were left half loaded: {type(error).__name__} {error}".strip()
            logger.exception("version %d could not be loaded", update.version)
            self._on_broken(reason)
            raise WeightUpdateFailed(f"{reason}; the worker starts again") from error
        self.state.applied(update.update_id, time.monotonic())
        self.announced = {}
        self._pool.record_weights(update.weights)
        logger.info("weights of version %d serve", update.version)
        self._versions.switch(update.version, progress)
        await self._pauses.end_commit(self._engine)
        self._on_applied()
        return {"version": update.version, **result}

    async def accept_initial(self, action: AcceptInitialWeights) -> Result:
        """Goes on with the weights that the engine began with, or restarts to have them again."""
        async with self._accepting:
            if not self.lacks_weights:
                raise Conflict(f"accept: expected weights that are lost; {self.state.describe()}")
            self.state.check_resting("accept")
            weights = PoolWeights(action.clock, action.update_id)
            self._pool.record_weights(weights)
            restarts = not self.state.weights.is_initial
            if restarts:
                self._on_broken("the pool goes on with the model's own weights")
            else:
                self.state.accept_initial(weights)
                self._on_applied()
        return {"restarts": restarts}

    async def abort(self, update_id: str, reason: str) -> Result:
        """Drops an update that is not being applied; says so of one that is, or was the last."""
        async with self._accepting:
            if self.state.has_applied(update_id):
                return {"is_applied": True}
            self.state.drop_update(update_id, reason)
            await self._clean_up()
        return {"is_applied": False}

    # ---- ends ------------------------------------------------------------------------

    def _ends_on_error(
        self, what: str, *, but_for: type[TitopoolError] | None = None
    ) -> EndsOnError:
        return EndsOnError(self.end, what, self.timeout_s, but_for)

    async def end(self, reason: str) -> None:
        """Ends update and communicator; the weights are as they were."""
        if self.state.phase is Phase.APPLYING:
            return
        update = self.state.update
        if update is not None and update.folder:
            self.state.drop_update(update.update_id, reason)
        elif self.state.phase is not Phase.CLOSED:
            self.state.end(reason)
        logger.warning("a weight update or its group has ended: %s", reason)
        await self._clean_up()

    async def _clean_up(self) -> None:
        self.steps.cancel()
        self.announced = {}
        try:
            await self._call("drop", self.state.phase is Phase.CLOSED)
        finally:
            await self._pauses.end_commit(self._engine)
