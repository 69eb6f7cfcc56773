"""Updates of TRL's client: tensor by tensor, without a begin or a commit.

Runs in: each worker process, on its loop. What `workers/weights/updates.py` does by call is done
here when it must be due: an update begins with its first tensor and ends as docs/http.md says.
"""

import asyncio
import time
from typing import Any

import msgspec

from titopool.errors import Conflict
from titopool.wire.commands import FinishTensors, PrepareUpdate, ReceiveTensor
from workers.weights.checks import refuse_split_layers
from workers.weights.state import Phase
from workers.weights.steps import Result
from workers.weights.updates import Updates


class TrlUpdates(Updates):
    """Updates in our own way and in TRL's."""

    async def receive_tensor(self, action: ReceiveTensor) -> Result:
        """Takes one more tensor; the first begins an update."""
        tensor = action.tensor
        async with self._accepting:
            if self.state.protocol != "trl":
                raise Conflict(
                    "update_named_param: expected init_communicator before it; "
                    + self.state.describe()
                )
            if self.state.phase is Phase.JOINING:
                # The client is in the group as soon as it can be, and does not ask.
                await self.steps.wait("join", self.state.session)
            await self._end_before(action)
            if self.state.phase is Phase.RECEIVING:
                self.state.touch(time.monotonic())
            else:
                update = self._update(action.update_id, action.version, action.clock)
                self.state.begin(self.state.session, update, time.monotonic())
                self.announced = {}
            # A tensor that is refused leaves the update without it: it is dropped as a whole.
            async with self._ends_on_error(f"{tensor.name} was refused"):
                await self._call("take", msgspec.msgpack.encode([tensor]))
            self.announced[tensor.name] = tensor
            update_now = self.state.update
            assert update_now is not None
        return {
            "update_id": update_now.update_id,
            "version": update_now.version,
            "clock": update_now.index - 1,
        }

    async def _end_before(self, action: ReceiveTensor) -> None:
        """Ends an update that is complete when the tensor belongs to the next one: at the first
        worker because it has come already, at the others because the first has ended its own."""
        if self.steps.is_running("finish", "trl"):
            await self.steps.wait("finish", "trl")
        update = self.state.update
        if not self.has_tensors or update is None:
            return
        is_behind = action.version is not None and update.index != action.clock + 1
        if action.tensor.name in self.announced or is_behind:
            fit = await self.fit_of_announced()
            if not fit["missing"]:
                await self._commit_tensors()

    async def finish_tensors(self, action: FinishTensors) -> Result:
        """Accepts the end of an update; without one, the caches are cleared only."""
        async with self._accepting:
            if not self.steps.is_running("finish", "trl"):
                step = self._commit_tensors() if self.has_tensors else self._clear_caches()
                self.steps.start("finish", "trl", step)
        return {}

    @property
    def has_tensors(self) -> bool:
        """Whether an update of TRL's client is in progress; one from a folder may be meanwhile."""
        state = self.state
        is_receiving = state.phase is Phase.RECEIVING and state.protocol == "trl"
        return is_receiving and state.update is not None and not state.update.folder

    async def _commit_tensors(self) -> Result:
        update = self.state.update
        if update is None or not self.has_tensors:
            return {}
        action = PrepareUpdate(update.update_id, self.kindest_policy)
        self.state.prepare(update.update_id, time.monotonic())
        await self.finish_prepare(action, update)
        self.state.apply(update.update_id, time.monotonic())
        return await self.finish_apply(update)

    async def _clear_caches(self) -> Result:
        async with asyncio.timeout(self.timeout_s):
            # While it stands: a step in between would miss what has gone already.
            await self._pauses.begin_commit(self._engine, self.kindest_policy)
            try:
                await self._engine.clear_caches()
            finally:
                await self._pauses.end_commit(self._engine)
        return {}

    async def fit_of_announced(self) -> dict[str, Any]:
        """What of the model is not in TRL's update under way: `missing`, and `split_layers`."""
        tensors = msgspec.msgpack.encode(list(self.announced.values()))
        (fit, *_) = await self._call("check", tensors, True)
        return dict(fit)

    async def _check_received(self) -> None:
        if self.state.protocol != "trl":
            return
        fit = await self.fit_of_announced()
        refuse_split_layers(fit["split_layers"])
        if fit["missing"] and self.state.update is not None:
            self._check_base(self.state.update.index - 1)
