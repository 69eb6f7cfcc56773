"""The group of one process, and the memory in which the tensors of its update arrive.

Runs in: vLLM's processes that hold the model, on the model's thread. `receiver.py` is the thread that
receives, `staging.py` the memory.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from titopool.wire.pool_state import CacheMode
from titopool.wire.weight_plan import Chunk
from workers.in_model.checkpoint_files import Refused
from workers.in_model.receiving.group import GroupArgs
from workers.in_model.receiving.receiver import Receiver
from workers.in_model.receiving.staging import (
    InHost,
    InKvCache,
    InPlace,
    Staging,
    StagingRoom,
    Tensors,
)
from workers.in_model.served_model import ServedModel

# How long a receiver may take to leave its group.
LEAVE_TIMEOUT_S = 10.0


class CannotLeave(Exception):
    """A receiver's thread does not end: only a new process can join a group."""


class Arrivals:
    """What comes from the trainer: at most one group, and the tensors of one update."""

    def __init__(self, model: ServedModel):
        self._model = model
        self._receiver: Receiver | None = None
        # Receivers of groups that have ended.
        self._closed: Sequence[Receiver] = ()
        self._room: StagingRoom | None = None
        # Of the update in progress.
        self._stagings: Sequence[Staging] = ()
        # What `receive` begins to receive.
        self._planned: tuple[list[Chunk], Staging] | None = None

    # ---- the group -------------------------------------------------------------------

    def join(self, given: GroupArgs) -> None:
        """Begins to join a group; leaves the last one.

        Raises:
            Refused: the group needs a GPU, or the port is taken.
            CannotLeave: a former group has not ended.
        """
        self.leave()
        for closed in self._closed:
            _check_has_ended(closed)
        self._closed = ()
        backend = given.backend
        if backend == "auto":
            backend = "gloo" if self._model.on_cpu else "nccl"
        if given.nccl_id and backend != "nccl":
            raise Refused(
                "nccl_id: expected a worker with a GPU, got one without, which uses gloo; pass the "
                "host and port of the trainer's store"
            )
        try:
            self._receiver = Receiver(replace(given, backend=backend), self._model.device)
        except OSError as error:
            raise Refused(f"cannot listen at {given.host}:{given.port}: {error}") from None

    def status(self) -> dict[str, Any] | None:
        """`Receiver.status`; None: no group."""
        return None if self._receiver is None else self._receiver.status()

    def leave(self) -> None:
        """Leaves the group, if there is one."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
            self._closed = [*self._closed, receiver]

    # ---- an update -------------------------------------------------------------------

    @property
    def receiver(self) -> Receiver:
        """Of the group, which must have been joined."""
        assert self._receiver is not None
        return self._receiver

    @property
    def staged(self) -> Tensors:
        """The tensors that have come, by name."""
        return self.receiver.staged

    @property
    def in_place(self) -> InPlace | None:
        """Where the tensors come in place, what hands them on."""
        return next((one for one in self._stagings if isinstance(one, InPlace)), None)

    def plan(
        self,
        chunks: list[Chunk],
        setting: str,
        extra_bytes: int,
        not_in_place: str,
        cache: CacheMode,
        whole_bytes: int,
    ) -> Staging:
        """Chooses where `chunks` wait, as `StagingRoom.choose`; receives them if generation may go on."""
        receiver = self.receiver
        if self._room is None:
            self._room = StagingRoom(setting, self._model.device, self._model.kv_caches)
        staging = self._room.choose(chunks, extra_bytes, not_in_place, cache, whole_bytes)
        self._stagings = [*self._stagings, staging]
        if isinstance(staging, InKvCache | InPlace):
            self._planned = (chunks, staging)
        else:
            receiver.announce(chunks, staging)
        return staging

    def receive(self) -> None:
        """Receives what was planned; generation stands until the caches are empty."""
        if self._planned is not None:
            # The last step's kernels may still read the cache.
            self._model.synchronize()
            self.receiver.announce(*self._planned)
            self._planned = None

    def set_aside(self) -> bool:
        """Moves tensors that have come out of the KV cache, so that generation can go on before the
        rest comes; returns whether there was room."""
        assert self._room is not None
        staged, cached = self.receiver.staged, self._in_kv_cache
        moved = {name: staged[name] for one in cached for name in one.names}
        if not self._room.fits_beside(sum(tensor.nbytes for tensor in moved.values())):
            return False
        self.receiver.staged = staged | {name: one.clone() for name, one in moved.items()}
        for one in cached:
            one.release()
        self._stagings = [one for one in self._stagings if one not in cached]
        return True

    @property
    def _in_kv_cache(self) -> list[InKvCache]:
        return [one for one in self._stagings if isinstance(one, InKvCache)]

    def drop(self) -> None:
        """Drops the tensors of an update that has ended; leaves a group that still sends.

        Raises:
            CannotLeave: NCCL may go on to write into memory that is used again.
        """
        receiver = self._receiver
        if receiver is not None and not receiver.is_idle:
            # Nothing may be written there after this.
            receiver.close()
            if any(isinstance(one, InKvCache | InHost) for one in self._stagings):
                _check_has_ended(receiver)
        self._release()
        if receiver is not None:
            receiver.drop()

    def _release(self) -> None:
        for staging in self._stagings:
            staging.release()
        self._stagings, self._planned = (), None


def _check_has_ended(receiver: Receiver) -> None:
    if not receiver.has_ended(LEAVE_TIMEOUT_S):
        raise CannotLeave(
            f"a former group did not end within {LEAVE_TIMEOUT_S:g} s: NCCL waits for a process that "
            "has ended"
        )
