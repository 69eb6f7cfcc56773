"""A worker's answers to commands, and what it watches between them.

Runs in: each worker process, on its loop. Talks to: `workers/weights/updates.py` and
`workers/weights/pauses.py`; `workers/serving/server.py` brings the commands and takes the answers.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from titopool.errors import NoReadyWorker, TitopoolError
from titopool.settings.config import ServerConfig
from titopool.wire.commands import (
    AbortUpdate,
    AcceptInitialWeights,
    ApplyUpdate,
    AwaitStep,
    BeginFolder,
    BeginUpdate,
    Command,
    CommandDone,
    DropAdapter,
    FinishTensors,
    GetStatus,
    JoinGroup,
    LeaveGroup,
    LoadAdapter,
    Pause,
    PrepareUpdate,
    ReceiveTensor,
    Resume,
    SwitchAdapter,
    UnloadAdapter,
)
from titopool.wire.pool_state import PoolState, PoolWeights
from workers.engine.base import Engine
from workers.engine.weights import WeightEngine
from workers.ledger import Ledger
from workers.serving.catch_up import CatchUp
from workers.weights.checks import checked_folder
from workers.weights.liveness import answers
from workers.weights.pauses import Pauses
from workers.weights.pool_view import PoolView
from workers.weights.state import Phase, Update
from workers.weights.steps import Result
from workers.weights.trl import TrlUpdates

logger = logging.getLogger(__name__)

WATCH_S = 0.25
# Phases in which nothing runs that would notice.
WATCHED = (Phase.RECEIVING, Phase.PREPARED)
# Phases in which no commit holds generation.
RESTING = (Phase.CLOSED, Phase.OPEN)


class Control:
    """Weight updates and pauses of one worker."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        worker_id: str,
        on_applied: Callable[[], None],
        on_broken: Callable[[str], None],
    ):
        """`on_applied` is called when other weights serve, `on_broken` when none can."""
        self._server_engine = engine
        self._config = config
        self._on_applied = on_applied
        self._worker_id = worker_id
        self._pool = PoolView(Ledger(config.run_dir, worker_id), self._on_news)
        self._pauses = Pauses(self._pool)
        self._updates = TrlUpdates(
            lambda: self._engine, engine.versions, self._pauses, config, self._pool,
            on_applied=on_applied, on_broken=on_broken,
        )  # fmt: skip
        self._catch_up = CatchUp(
            self._pool, self._updates, self._pauses, engine=lambda: self._engine,
            adapters=lambda: engine.adapters, weights_root=config.weights_root,
            on_changed=on_applied,
        )  # fmt: skip
        self._is_ready = False
        # The front end that leads the commit, by its socket; it tells when to apply.
        self._leader = b""
        # An update and how many tensors it had at the last look that found them all received.
        self._seen: tuple[str, int] = ("", 0)

    @property
    def _engine(self) -> WeightEngine:
        return self._server_engine.weights

    @property
    def phase(self) -> str:
        """`ready`, or why this worker gets no jobs although its engine is loaded."""
        if not self._updates.lacks_weights:
            return "ready"
        if self._catch_up.is_under_way:
            return "catching_up"
        return "waiting_for_weights" if self.weights.is_initial else "stale"

    @property
    def is_in_a_call(self) -> bool:
        """Whether the engine may be busy with weights, for which there is a deadline."""
        return self._updates.is_in_a_call

    @property
    def weights(self) -> PoolWeights:
        """Those that serve here."""
        return self._updates.state.weights

    @property
    def pool(self) -> PoolState:
        """What this worker knows of its pool."""
        return self._pool.state if self._is_ready else PoolState()

    def hear(self, pool: PoolState) -> None:
        """Takes what a front end knows of the pool."""
        self._pool.hear(pool)

    def _on_news(self) -> None:
        self._catch_up.notify()

    async def lose_front_end(self, identity: bytes) -> None:
        """Nobody leads a commit any more whose front end is gone; the old weights serve.

        If it has told another worker to apply the update, this one hears so from other front ends
        within a heartbeat, long before it takes one for gone.
        """
        state = self._updates.state
        if identity == self._leader and state.phase in (Phase.PREPARING, Phase.PREPARED):
            await self._updates.end("the front end that led the commit is gone")

    # ---- commands --------------------------------------------------------------------

    async def answer(self, command: Command, identity: bytes = b"") -> CommandDone:
        """Does what the front end `identity` asks; whatever happens, there is an answer."""
        if isinstance(command.action, PrepareUpdate):
            self._leader = identity
        try:
            return CommandDone(command.command_id, await self._run(command))
        except TitopoolError as error:
            return CommandDone(command.command_id, {}, error.code, error.message)
        except Exception as error:
            logger.exception("a command failed")
            text = (
                f"worker {self._worker_id} failed: {type(error).__name__}; its log has the reason"
            )
            return CommandDone(command.command_id, {}, TitopoolError.code, text)

    async def _run(self, command: Command) -> Result:
        if not self._is_ready:
            raise NoReadyWorker(
                f"worker {self._worker_id} is not ready yet; ask /ready and try again",
                retry_after_s=2,
            )
        updates = self._updates
        match command.action:
            case JoinGroup() as action:
                # What has come whole is not lost with its session: other workers may have it.
                await self.before_job()
                return await updates.join(action)
            case BeginUpdate() as action:
                return await updates.begin(action)
            case BeginFolder() as action:
                return await updates.begin_folder(action)
            case ReceiveTensor() as action:
                return await updates.receive_tensor(action)
            case PrepareUpdate() as action:
                return await updates.prepare(action)
            case ApplyUpdate() as action:
                return await updates.apply(action)
            case FinishTensors() as action:
                return await updates.finish_tensors(action)
            case AbortUpdate(update_id=update_id, reason=reason):
                return await updates.abort(update_id, reason)
            case LeaveGroup(session=session, finishes=finishes):
                if finishes:
                    await self.before_job()
                return await updates.leave(session)
            case AwaitStep(step=step, of=of):
                return await updates.steps.wait(step, of)
            case AcceptInitialWeights() as action:
                return await updates.accept_initial(action)
            case Pause() as action:
                work = self._pause(action)
                updates.steps.start("pause", str(command.command_id), work)
                return await updates.steps.wait("pause", str(command.command_id))
            case Resume(clock=clock):
                return {"was_paused": await self._pauses.resume(self._engine, clock)}
            case LoadAdapter() | SwitchAdapter() | DropAdapter() | UnloadAdapter() as action:
                return await self._change_adapter(action)
            case GetStatus():
                return self.status()

    async def _change_adapter(
        self, action: LoadAdapter | SwitchAdapter | DropAdapter | UnloadAdapter
    ) -> Result:
        adapters = self._server_engine.adapters
        match action:
            case LoadAdapter(name=name, version=version, folder=folder):
                found = checked_folder(folder, self._config.weights_root, "lora_path")
                await adapters.load(name, version, found)
                return {}
            case DropAdapter(name=name, version=version):
                adapters.drop(name, version)
                return {}
            case SwitchAdapter(name=name, version=version, clock=clock):
                adapters.switch(name, version)
                self._pool.record_adapter(name, adapters.record_of(name), clock)
            case UnloadAdapter(name=name, clock=clock):
                version = adapters.unload(name)
                self._pool.record_adapter(name, None, clock)
        self._on_applied()
        return {"version": version}

    @property
    def adapters(self) -> dict[str, int]:
        """LoRA adapters by name, and the version of each that serves."""
        return self._server_engine.adapters.versions if self._is_ready else {}

    async def _pause(self, action: Pause) -> Result:
        await self._pauses.lease(self._engine, action.mode, action.lease_s, action.clock)
        return {}

    def status(self) -> dict[str, Any]:
        """What `GET /weights` says of this worker."""
        state = self._updates.state
        return {
            "worker": self._worker_id,
            "state": state.phase,
            "session": state.session or None,
            "update": state.update.update_id if state.update else None,
            "weight_version": state.weights.version,
            "last_update": state.weights.update_id or None,
            "waits_for_weights": self._updates.lacks_weights,
            "is_paused": self._pauses.lease_left_s is not None,
            "lease_left_s": self._pauses.lease_left_s,
            "last_end": state.last_end or None,
            "adapters": self.adapters,
            "adapter_versions": self._server_engine.adapters.latest_versions,
        }

    # ---- between commands ------------------------------------------------------------

    async def get_ready(self, model: str) -> None:
        """Gets what the pool that serves `model` has, before the first job."""
        self._pool.start(model)
        self._is_ready = True
        await self._catch_up.catch_up()

    async def before_job(self) -> None:
        """Lets an update of TRL's client end, if it can, before a job runs."""
        state = self._updates.state
        if state.protocol != "trl" or state.phase in (Phase.OPEN, Phase.JOINING):
            return
        try:
            if self._updates.has_tensors:
                await self._end_if_complete()
            if self._updates.steps.is_running("finish", "trl"):
                await self._updates.steps.wait("finish", "trl")
        except TitopoolError as error:
            # The old weights serve, or the worker is about to end.
            logger.warning("an update did not end before a job: %s", error)

    async def follow_pool(self) -> None:
        """Catches up with the pool; never returns."""
        await self._catch_up.run()

    async def watch(self) -> None:
        """Ends what has passed its deadline or lost its trainer; never returns."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._look()
            except TitopoolError as error:
                if self._updates.state.phase in WATCHED:
                    await self._updates.end(error.message)
            except Exception:
                logger.exception("the watch over weight updates goes on after an error")

    async def _look(self) -> None:
        if self._pauses.has_expired():
            logger.warning("pause lease expired; resuming generation")
            await self._pauses.expire(self._engine)
        state, updates = self._updates.state, self._updates
        if self._pauses.is_committing and state.phase in RESTING and not updates.steps.is_busy:
            logger.error("generation was still paused after a commit; resuming it")
            await self._pauses.end_commit(self._engine)
        if state.phase not in WATCHED:
            return
        if state.has_expired(time.monotonic()):
            await updates.end(
                f"{state.phase} for more than {updates.timeout_s:g} s (weight_update_timeout_s)"
            )
        elif state.phase is Phase.RECEIVING and state.update and not state.update.folder:
            await updates.receiving()
            if updates.has_tensors:
                await self._end_if_complete()
            elif not await self._trainer_answers(state.update):
                await updates.end("the trainer is gone")

    async def _trainer_answers(self, update: Update) -> bool:
        there = self._updates.joined
        if there is None or there.protocol == "trl" or await answers(there.host, there.port):
            return True
        # It took a while to find that out: the update may have gone on, and the trainer after it.
        state = self._updates.state
        return state.update is not update or state.phase is not Phase.RECEIVING

    async def _end_if_complete(self) -> None:
        """Ends an update of TRL's client when all of the model is there.

        What is not complete waits for `/reset_prefix_cache`: the client may be about to send the
        rest, or gone.
        """
        updates, state = self._updates, self._updates.state
        statuses = await updates.receiving()
        if state.update is None or not updates.has_tensors:
            # It has ended meanwhile.
            return
        now_there = (state.update.update_id, len(updates.announced))
        has_all = all(one["num_received"] >= one["num_announced"] for one in statuses)
        if has_all and self._seen != now_there:
            fit = await updates.fit_of_announced()
            self._seen = now_there
            if not fit["missing"]:
                await updates.finish_tensors(FinishTensors())
