"""Updates tensor by tensor, without a begin and without a commit: those of TRL's client up to 1.10.

The worker infers both. An update begins with its first
tensor. It is committed at `/reset_prefix_cache/`, or as soon as it is complete and a job, the next
update or the end of the session follows (docs/http.md).
"""

import logging
import time

from titopool.errors import Conflict, TitopoolError, WeightUpdateFailed
from titopool.wire.commands import AnnounceTensors, PrepareUpdate
from titopool.wire.pool_state import PoolWeights
from workers.weights.state import Phase
from workers.weights.steps import Result
from workers.weights.updates import Trainer

logger = logging.getLogger(__name__)

# The name of the step that commits an update.
FINISH = ("finish", "tensors")


class TensorTrainer(Trainer):
    """How a trainer sends whose calls are "tensors" (`titopool/wire/commands.py`)."""

    async def look(self) -> None:
        await self._finish_if_complete()

    # ---- receiving -------------------------------------------------------------------

    async def announce(self, action: AnnounceTensors) -> Result:
        """Receives one more tensor; the first one begins an update."""
        (tensor,) = action.tensors
        await self._await_session()
        await self._commit_if_next(action, tensor.name)
        if update := self.update:
            self.state.touch(time.monotonic())
        else:
            update = self.updates.begin(action, self.state.session)
        # A refused tensor ends the update, which would be incomplete without it.
        async with self.updates.ends_on_failure(f"{tensor.name} was refused"):
            await self.updates.take(
                [tensor], self.updates.chunk_bytes_of(action), "one tensor at a time"
            )
        if self.state.update is not update:
            raise WeightUpdateFailed(
                f"the update ended while {tensor.name} was received; {self.state.describe()}"
            )
        return self.updates.begun(update)

    async def _await_session(self) -> None:
        """Waits until all ranks of the group have joined.

        Raises:
            Conflict: there is no group of such a trainer.
        """
        if not self.has_session:
            raise Conflict(
                "update_named_param: expected a call of init_communicator first; "
                + self.state.describe()
            )
        if self.state.phase is Phase.JOINING:
            # TRL's client sends tensors as soon as its own rank has joined.
            await self.steps.wait("join", self.state.session)

    async def _commit_if_next(self, action: AnnounceTensors, name: str) -> None:
        """Commits a complete update if the tensor `name` belongs to the next update.

        At the first worker, a tensor of the next update has a name that was announced before. For
        the other workers, the first worker's clock decides: they commit when it has committed.
        """
        if self.steps.is_running(*FINISH):
            await self.steps.wait(*FINISH)
        update = self.update
        if update is None:
            return
        is_repeated = name in self.updates.told
        is_behind_first = action.version is not None and update.clock != action.clock + 1
        if (is_repeated or is_behind_first) and not (await self.updates.fit())["missing"]:
            await self._commit(update)

    # ---- finishing -------------------------------------------------------------------

    async def start_to_finish(self) -> None:
        """Starts to commit the update; without an update, to clear the caches."""
        async with self.updates.accepting:
            if not self.steps.is_running(*FINISH):
                update = self.update
                self.steps.start(
                    *FINISH, self._commit(update) if update else self.updates.run_clear()
                )

    async def finish(self) -> None:
        if not self.has_session or self.state.phase in (Phase.OPEN, Phase.JOINING):
            return
        try:
            await self._finish_if_complete()
            if self.steps.is_running(*FINISH):
                await self.steps.wait(*FINISH)
        except TitopoolError as error:
            # The old weights serve, or the worker is about to restart.
            logger.warning("an update of TRL's client failed: %s", error)

    async def _finish_if_complete(self) -> None:
        """Starts to commit an update that has all tensors of the model.

        An incomplete update waits for more tensors, or for `/reset_prefix_cache/`.
        """
        if self.update is None:
            return
        statuses = await self.updates.call.receiver_statuses()
        # Read again, as the update may have ended during the call.
        update = self.update
        if update is None:
            return
        has_all = all(one["num_received"] >= one["num_announced"] for one in statuses)
        if has_all and not (await self.updates.fit())["missing"]:
            async with self.updates.accepting:
                # The next update may have begun while this task waited for the lock.
                if self.update is update and not self.steps.is_running(*FINISH):
                    self.steps.start(*FINISH, self._commit(update))

    async def _commit(self, update: PoolWeights) -> Result:
        """Prepares and applies the update in one step."""
        if self.update is not update:
            # The update has ended before this step began.
            return {}
        action = PrepareUpdate(update.update_id, self.updates.default_pause_mode)
        self.state.prepare(update.update_id, time.monotonic())
        await self.updates.run_prepare(action, update)
        self.state.apply(update.update_id, time.monotonic())
        return await self.updates.run_apply(update)
