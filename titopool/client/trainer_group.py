"""The group through which a trainer sends weights: it is rank 0, and the others meet at its port.

Runs in: trainers; `workers/in_model/group.py` is the other side. Ranks tell each other that they are
there before any of them enters NCCL, which waits for ever for one that is not.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# Names in the store, for both sides.
GLOO_PREFIX = "titopool/gloo"
# Between two looks into the store, and at a GPU's event.
STORE_POLL_S = 0.005
POLL_S = 0.0005
# Between two looks at the workers while an event does not come.
LOOK_S = 2.0
# Between two looks at whether a group can still form.
FORM_POLL_S = 0.02
# Where this process reaches its own store, which listens at all addresses, IPv6 ones too.
ANY_ADDRESS = "0.0.0.0"


def rank_key(rank: int) -> str:
    """Set by a rank that is there."""
    return f"titopool/rank/{rank}"


def told_key(number: int) -> str:
    """The `number`-th thing that rank 0 told the others; the first is NCCL's id."""
    return f"titopool/told/{number}"


class TrainerGroup:
    """Rank 0: NCCL for a GPU, else gloo."""

    def __init__(self, device: Any, world_size: int, *, timeout_s: float):
        """Listens at `port`, until `abort`."""
        import torch
        from torch.distributed import TCPStore

        self._device = device
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._store: Any = TCPStore(
            ANY_ADDRESS, 0, None, True, timeout=self._limit, wait_for_workers=False
        )
        self._group: Any = None
        self.port: int = self._store.port
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.device_uuid = ""
        if device.type == "cuda":
            self.device_uuid = str(torch.cuda.get_device_properties(device).uuid)

    def form(self, *, gives_up: Callable[[], bool]) -> None:
        """Returns when all ranks are in the group.

        Raises:
            Exception: they were not in time, or one can be no more, which `gives_up` tells. The
                caller aborts the group then.
        """
        keys = [rank_key(rank) for rank in range(1, self._world_size)]
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(keys):
            if gives_up() or time.monotonic() > deadline:
                raise TimeoutError("not all workers came")
            time.sleep(STORE_POLL_S)
        make = self._form_nccl if self.backend == "nccl" else self._form_gloo
        self._group = within(self._timeout_s, f"{self.backend} formed no group", make, gives_up)

    def _form_gloo(self) -> Any:
        from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

        # A connection of its own: what waits in it ends when `abort` closes the store.
        store = TCPStore(
            ANY_ADDRESS, self.port, None, False, timeout=self._limit, wait_for_workers=False
        )
        store.set(rank_key(0), b"1")
        return ProcessGroupGloo(PrefixStore(GLOO_PREFIX, store), 0, self._world_size, self._limit)

    def _form_nccl(self) -> Any:
        from titopool.client.nccl import Nccl, new_id

        nccl_id = new_id()
        self._store.set(told_key(0), nccl_id)
        self._store.set(rank_key(0), b"1")
        return Nccl(rank=0, world_size=self._world_size, nccl_id=nccl_id, device=self._device)

    def broadcast(self, buffer: Any, *, look: Callable[[], None]) -> Callable[[], Any]:
        """Begins to send `buffer`, uint8 of one dimension, which must stay as it is.

        Returns:
            What waits for the end of it, and raises if `look` does, which is called now and then.
        """
        if self.backend == "nccl":
            self._group.broadcast(buffer, 0)
            event = self._group.stream.record_event()
            return lambda: self._wait_for(event, look)
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        wait: Callable[[], Any] = self._group.broadcast([buffer], options).wait
        return wait

    def _wait_for(self, event: Any, look: Callable[[], None]) -> None:
        """Waits for the GPU, but not for workers that are gone: NCCL would, for ever."""
        deadline = time.monotonic() + self._timeout_s
        next_look = time.monotonic() + LOOK_S
        while not event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a broadcast did not end within {self._timeout_s:g} s")
            if time.monotonic() > next_look:
                look()
                next_look = time.monotonic() + LOOK_S
            time.sleep(POLL_S)

    def abort(self) -> None:
        """Gives up what is under way and leaves; the port is closed, which tells the workers."""
        # An error that somebody keeps may keep this object.
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()


def within(
    timeout_s: float, what: str, make: Callable[[], Any], gives_up: Callable[[], bool]
) -> Any:
    """The group that `make` gives, or what it raises; it runs in a thread, which nothing can end.

    Raises:
        TimeoutError: it did not end within `timeout_s`, or before `gives_up`; the thread is left
            behind, and aborts what it makes.
    """
    ends: list[tuple[Any, BaseException | None]] = []
    is_left = threading.Event()

    def run() -> None:
        try:
            made = make()
        except BaseException as error:
            ends.append((None, error))
            return
        ends.append((made, None))
        if is_left.is_set():
            made.abort()

    thread = threading.Thread(target=run, name="titopool-within", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline and not gives_up():
        thread.join(FORM_POLL_S)
    if not ends:
        is_left.set()
        for made, _ in ends:
            # It came in this moment.
            if made is not None:
                made.abort()
        raise TimeoutError(f"{what} within {timeout_s:g} s: a worker is gone, or does not answer")
    made, error = ends[0]
    if error is not None:
        raise error
    return made
