"""Updates of a start, lists of tensors and an end: those of vLLM's routes.

The calls of vLLM's trainers, TRL's client from 1.11 on among them, name neither a session nor an
update, and nothing closes a session. So a worker has at most one such session, the calls mean its
update, and the next trainer replaces it. An update may end with parts of a layer: they stay staged
until later updates bring the other parts.
"""

import asyncio
import time

import msgspec

from titopool.errors import InvalidRequest, WeightUpdateFailed
from titopool.wire.commands import AnnounceTensors, EndTensors, JoinGroup, TensorInfo
from titopool.wire.pool_state import PoolWeights
from workers.weights.checks import check_whole_layers, is_listening
from workers.weights.state import Phase
from workers.weights.steps import Result
from workers.weights.updates import IN_PLACE, Trainer, Updates

# How long a trainer may take to listen, from its call on: it does both at the same time.
LISTEN_TIMEOUT_S = 30.0
LISTEN_POLL_S = 0.1


class ListTrainer(Trainer):
    """How a trainer sends whose calls are "lists" (`titopool/wire/commands.py`)."""

    listens_later = True

    def __init__(self, updates: Updates):
        super().__init__(updates)
        # The update between its start and its end; "": none.
        self._started = ""
        # The last list of the update in progress, with the bytes of its chunks, and its id.
        self._last: tuple[tuple[list[TensorInfo], int], str] | None = None
        # The last tensors of the session.
        self._last_tensors: list[TensorInfo] = []
        # A first list that was not the whole model: a check of its own is wasted.
        self._incomplete: list[TensorInfo] = []

    # ---- the group -------------------------------------------------------------------

    def is_forming(self, action: JoinGroup) -> bool:
        group = self.updates.group
        return (
            group is not None
            and self.state.phase is Phase.JOINING
            and msgspec.structs.replace(action, session=group.session) == group
        )

    def begin_session(self) -> None:
        self._started, self._last = "", None
        self._last_tensors = []

    async def check_address(self, action: JoinGroup) -> None:
        """Waits for the trainer to listen: a process that connects too early blocks in its store."""
        if not action.trainer_listens:
            return
        limit_s = min(LISTEN_TIMEOUT_S, self.updates.timeout_s)
        end = time.monotonic() + limit_s
        while not await is_listening(action.host, action.port):
            if time.monotonic() > end:
                raise InvalidRequest(
                    "master_address, master_port: expected an address at which workers reach "
                    f"the trainer, got {action.host}:{action.port}, where nothing answered for "
                    f"{limit_s:g} s; give an address of the trainer's machine that the workers "
                    "can resolve, and allow their connections",
                    param="master_address",
                )
            self.updates.call.awaited.observe([{"rank": action.rank, "missing_ranks": [0]}])
            await asyncio.sleep(LISTEN_POLL_S)

    async def is_abandoned(self, newcomer: JoinGroup | None = None) -> bool:
        """A trainer that closes nothing is replaced between its updates, and by its own address."""
        group = self.updates.group
        if group is not None and newcomer is not None and newcomer.calls == "lists":
            is_same = group.host == newcomer.host != "" and group.port == newcomer.port
            if is_same or self.state.phase is Phase.OPEN:
                return True
        return await super().is_abandoned(newcomer)

    def check_leave(self) -> None:
        if self._is_started:
            raise self.state.conflict("shutdown_weight_transfer_engine", "no update")

    @property
    def _is_started(self) -> bool:
        """Whether an update of lists has started and not ended."""
        update = self.update
        return update is not None and update.update_id == self._started

    @property
    def is_receiving_list(self) -> bool:
        return self._last is not None and self.steps.is_running("receive", self._last[1])

    @property
    def keeps_group(self) -> bool:
        """Between two lists no broadcast is half done, so that the next update can use the group."""
        return self.state.phase is not Phase.JOINING and not self.is_receiving_list

    def check_prepare(self, update_id: str) -> None:
        if self._is_started and update_id == self._started:
            raise self.state.conflict("commit", "a call of finish_weight_update first")

    # ---- an update -------------------------------------------------------------------

    async def announce(self, action: AnnounceTensors) -> Result:
        return await self._receive(action) if action.list_id else self._start(action)

    def _start(self, action: AnnounceTensors) -> Result:
        """Opens an update, or continues one that lacks parts of layers; touches nothing."""
        what = "start_weight_update"
        if not self.has_session or action.session not in ("", self.state.session):
            raise self.state.conflict(
                what, "a group of this worker; call init_weight_transfer_engine first"
            )
        update = self.update
        if update is None:
            self.state.check_session(what, self.state.session)
            update = self.updates.begin(action, self.state.session)
        elif self._is_started or (action.session and action.update_id != update.update_id):
            raise self.state.conflict(what, "no update; call finish_weight_update first")
        self.state.touch(time.monotonic())
        # The same list again, after a start, is another one.
        self._started, self._last = update.update_id, None
        self.updates.pauses.renew()
        return self.updates.begun(update)

    def _started_update(self, what: str, update_id: str | None) -> PoolWeights:
        """The update that has started and not ended.

        Raises:
            Conflict: there is none, or another worker means another update.
        """
        update = self.update
        if update is None or not self._is_started:
            raise self.state.conflict(what, "an update; call start_weight_update first")
        if update_id and update_id != update.update_id:
            raise self.state.conflict(what, f"update {update_id}")
        return update

    async def _receive(self, action: AnnounceTensors) -> Result:
        """Checks a list and starts to receive it; `AwaitStep("receive", list_id)` waits for the end.

        Raises:
            InvalidRequest: a name, shape or dtype does not fit. The update and the group end,
                because the trainer is in its first broadcast already.
        """
        update = self._started_update("update_weights", action.update_id)
        tensors = action.tensors or self._last_tensors
        if not tensors:
            raise InvalidRequest(
                "update_info.names: expected at least one tensor, as this session has had no list "
                "that an empty one could repeat; send the names",
                param="update_info",
            )
        wanted = tensors, self.updates.chunk_bytes_of(action)
        if self._last is not None and wanted == self._last[0]:
            return {"update_id": update.update_id, "list_id": self._last[1]}
        if self.is_receiving_list:
            raise self.state.conflict("update_weights", "the end of the list before")
        if self.updates.staging == IN_PLACE:
            raise self.state.conflict(
                "update_weights", "finish_weight_update, as all tensors went in place"
            )
        self.updates.pauses.renew()
        self.state.touch(time.monotonic())
        async with self.updates.ends_on_failure("the tensors were refused", keeps_group=False):
            is_whole = await self._check_first(tensors)
            not_in_place = "" if is_whole else "a list without all tensors of the model"
            await self.updates.take(*wanted, not_in_place)
            if self.state.update is not update:
                raise WeightUpdateFailed(f"the update ended; {self.state.describe()}")
        self._last, self._last_tensors = (wanted, action.list_id), tensors
        self.steps.start("receive", action.list_id, self._run_receive(update))
        return {"update_id": update.update_id, "list_id": action.list_id}

    async def _check_first(self, tensors: list[TensorInfo]) -> bool:
        """Checks the first list of an update as a whole, before anything is received.

        If it is all of the model, that finds parameters that would stay old. A later list, or one
        tensor, is checked by itself, and with all others at the end.

        Returns:
            Whether it is all of the model.
        """
        if self.updates.told or len(tensors) == 1 or tensors == self._incomplete:
            return False
        fit = await self.updates.fit_of(tensors, 1)
        if fit["missing"]:
            self._incomplete = tensors
        return not fit["missing"]

    async def _run_receive(self, update: PoolWeights) -> Result:
        async with self.updates.ends_on_failure("the tensors were not received", keeps_group=False):
            await self.updates.load_in_place()
            await self.updates.call.wait_for_receivers(
                lambda status: bool(status["num_received"] >= status["num_announced"])
            )
            if self.state.update is update and self.state.phase is Phase.RECEIVING:
                self.state.touch(time.monotonic())
            self.updates.pauses.renew()
        return {}

    async def end_tensors(self, action: EndTensors) -> Result:
        """Ends an update: answers whether whole layers have come, so that it can be committed.

        An update without tensors ends here. One that lacks parts of layers stays.
        """
        what = "finish_weight_update"
        async with self.updates.accepting:
            waiting = self.update
            if action.is_last_call and waiting is not None and not self._is_started:
                # Its end has come before.
                self._started = waiting.update_id
            elif action.is_last_call and action.update_id is None:
                return {"update_id": None, "is_ready": False, "split_layers": ""}
            update = self._started_update(what, action.update_id)
            if self.is_receiving_list:
                raise self.state.conflict(what, "the end of update_weights")
            self._started = ""
            if not self.updates.told:
                self.state.end("", keeps_group=True)
                self.updates.forget_begin()
                return {"update_id": None, "is_ready": False, "split_layers": ""}
            self.state.touch(time.monotonic())
            if action.label:
                self.state.set_label(action.label)
            self.updates.pauses.renew()
            async with self.updates.ends_on_failure("the tensors were refused"):
                fit = await self.updates.fit()
                if action.is_last_call:
                    check_whole_layers(fit["split_layers"])
                if fit["split_layers"]:
                    await self.updates.set_aside()
        split = fit["split_layers"]
        return {"update_id": update.update_id, "is_ready": not split, "split_layers": split}
