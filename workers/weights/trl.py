"""Weight updates of TRL's client: tensor by tensor, without a begin and without a commit.

TRL's client sends no begin or commit, so the worker infers both. An update begins with its first
tensor. It is committed at `/reset_prefix_cache/`, or as soon as it is complete and a job, the next
update or the end of the session follows (docs/http.md).
"""

import asyncio
import logging
import time
from typing import Any

import msgspec

from titopool.errors import Conflict, DeadlinePassed, TitopoolError, WeightUpdateFailed
from titopool.wire.commands import (
    FinishTensors,
    JoinGroup,
    LeaveGroup,
    PrepareUpdate,
    ReceiveTensor,
    TensorInfo,
)
from titopool.wire.pool_state import PoolWeights
from workers.weights.checks import check_whole_layers
from workers.weights.peers import PeerUpdates
from workers.weights.state import Phase
from workers.weights.steps import Result

logger = logging.getLogger(__name__)

# The name of the step that commits an update.
FINISH = ("finish", "trl")


class TrlUpdates(PeerUpdates):
    """Updates of TRL's client, besides those of `WeightsClient`."""

    def __init__(self, *args: Any, **options: Any):
        """Takes what `PeerUpdates` takes."""
        super().__init__(*args, **options)
        # By update id, then by name: the tensors that TRL's client has announced so far.
        self._announced: dict[str, dict[str, TensorInfo]] = {}
        # Update id and number of announced tensors at the last check for completeness.
        self._checked = ("", 0)

    async def join(self, action: JoinGroup) -> Result:
        """Commits a complete update of the previous session first: other workers may have it."""
        await self.finish_if_complete()
        return await super().join(action)

    async def leave(self, action: LeaveGroup) -> Result:
        """Commits a complete update first if the command says so."""
        if action.finishes:
            await self.finish_if_complete()
        return await super().leave(action)

    # ---- receiving -------------------------------------------------------------------

    async def receive_tensor(self, action: ReceiveTensor) -> Result:
        """Receives one more tensor; the first one begins an update."""
        tensor = action.tensor
        async with self._accepting:
            await self._await_session()
            await self._commit_if_next(action)
            update = self._begin_or_continue(action)
            # A refused tensor ends the update, which would be incomplete without it.
            async with self._ends_on_failure(f"{tensor.name} was refused"):
                await self._take(msgspec.msgpack.encode([tensor]), 0, "one tensor at a time")
            if self.state.update is not update:
                raise WeightUpdateFailed(
                    f"the update ended while {tensor.name} was received; {self.state.describe()}"
                )
            self._announced.setdefault(update.update_id, {})[tensor.name] = tensor
        return {
            "update_id": update.update_id,
            "version": update.version,
            "clock": update.clock - 1,
            "base_clock": self._base_clock,
        }

    async def _await_session(self) -> None:
        """Waits until all ranks of TRL's group have joined.

        Raises:
            Conflict: there is no group of TRL's client.
        """
        if self.state.protocol != "trl":
            raise Conflict(
                "update_named_param: expected a call of init_communicator first; "
                + self.state.describe()
            )
        if self.state.phase is Phase.JOINING:
            # TRL's client sends tensors as soon as its own rank has joined.
            await self.steps.wait("join", self.state.session)

    async def _commit_if_next(self, action: ReceiveTensor) -> None:
        """Commits a complete update if the tensor belongs to the next update.

        At the first worker, a tensor of the next update has a name that was announced before. For
        the other workers, the first worker's clock decides: they commit when it has committed.
        """
        if self.steps.is_running(*FINISH):
            await self.steps.wait(*FINISH)
        update = self._trl_update
        if update is None:
            return
        is_repeated = action.tensor.name in self._announced_for(update)
        is_behind_first = action.version is not None and update.clock != action.clock + 1
        if (is_repeated or is_behind_first) and await self._is_complete(update):
            await self._commit(update)

    def _begin_or_continue(self, action: ReceiveTensor) -> PoolWeights:
        if update := self._trl_update:
            self.state.touch(time.monotonic())
            return update
        update = self._new_update(action)
        self.state.begin(self.state.session, update, time.monotonic())
        self._announced = {}
        return update

    @property
    def _trl_update(self) -> PoolWeights | None:
        """The update of TRL's client that is being received; not an update from a folder."""
        is_trl = self.state.is_receiving_tensors and self.state.protocol == "trl"
        return self.state.update if is_trl else None

    def _announced_for(self, update: PoolWeights) -> dict[str, TensorInfo]:
        return self._announced.get(update.update_id, {})

    async def _fit_of(self, update: PoolWeights) -> dict[str, Any]:
        """How the announced tensors fit the model: names that are `missing`, and `split_layers`."""
        tensors = msgspec.msgpack.encode(list(self._announced_for(update).values()))
        (fit, *_) = await self._call("check", tensors, True)
        return dict(fit)

    async def _is_complete(self, update: PoolWeights) -> bool:
        return not (await self._fit_of(update))["missing"]

    # ---- finishing -------------------------------------------------------------------

    async def finish_tensors(self, action: FinishTensors) -> Result:
        """Starts to commit the update; without an update, to clear the caches."""
        async with self._accepting:
            if not self.steps.is_running(*FINISH):
                update = self._trl_update
                self.steps.start(*FINISH, self._commit(update) if update else self._clear_caches())
        return {}

    async def finish_if_complete(self) -> None:
        """Commits an update that has all tensors of the model, and waits for the end."""
        if self.state.protocol != "trl" or self.state.phase in (Phase.OPEN, Phase.JOINING):
            return
        try:
            await self._start_to_finish()
            if self.steps.is_running(*FINISH):
                await self.steps.wait(*FINISH)
        except TitopoolError as error:
            # The old weights serve, or the worker is about to restart.
            logger.warning("an update of TRL's client failed: %s", error)

    async def _check_receiving(self) -> None:
        if self.state.protocol == "trl":
            await self._start_to_finish()
        else:
            await super()._check_receiving()

    async def _start_to_finish(self) -> None:
        """Starts to commit an update that has all tensors of the model.

        An incomplete update waits for more tensors, or for `/reset_prefix_cache/`.
        """
        if self._trl_update is None:
            return
        statuses = await self._call.receiver_statuses()
        # Read again, as the update may have ended during the call.
        update = self._trl_update
        if update is None:
            return
        current = (update.update_id, len(self._announced_for(update)))
        has_all = all(one["num_received"] >= one["num_announced"] for one in statuses)
        if has_all and self._checked != current:
            is_complete = await self._is_complete(update)
            self._checked = current
            if is_complete:
                async with self._accepting:
                    # The next update may have begun while this task waited for the lock.
                    if self._trl_update is update and not self.steps.is_running(*FINISH):
                        self.steps.start(*FINISH, self._commit(update))

    async def _commit(self, update: PoolWeights) -> Result:
        """Prepares and applies the update in one step."""
        if self._trl_update is not update:
            # The update has ended before this step began.
            return {}
        action = PrepareUpdate(update.update_id, self.default_pause_mode)
        self.state.prepare(update.update_id, time.monotonic())
        await self._run_prepare(action, update)
        self.state.apply(update.update_id, time.monotonic())
        return await self._run_apply(update)

    async def _check_received(self) -> list[str]:
        update = self.state.update
        if update is None or self.state.protocol != "trl":
            return await super()._check_received()
        fit = await self._fit_of(update)
        check_whole_layers(fit["split_layers"])
        if fit["missing"]:
            self._check_base(self._base_clock)
        return list(fit["ignored"])

    async def _clear_caches(self) -> Result:
        if self._pauses.is_held:
            # They are clear, and stay so until new weights are complete.
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pause_and_clear()
                # A commit in progress empties the caches before the model changes.
                await self._pauses.wait_for_commit()
        except TimeoutError:
            raise DeadlinePassed(
                f"the caches were not emptied within {self._timeout_s:g} s "
                "(weight_update_timeout_s); ask /weights for the state and try again"
            ) from None
        return {}

    async def _pause_and_clear(self) -> None:
        async with self._clearing:
            if self._pauses.is_committing:
                return
            # Generation is paused, as a step in between could use an entry that is being cleared.
            await self._pauses.begin_commit(self._engine, self.default_pause_mode)
            try:
                await self._engine.clear_caches()
            finally:
                await self._pauses.end_commit(self._engine)
