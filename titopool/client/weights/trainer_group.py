"""The process group through which a trainer sends weights: rank 0 of `titopool/wire/rendezvous.py`.

The trainer listens; the workers' ranks connect to its store. Rank 0 waits for every rank before it
enters NCCL, because NCCL waits forever for a rank that is missing.

Runs in: trainers. The workers' side is `workers/in_model/receiving/group.py`.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

from titopool.wire.rendezvous import GLOO_PREFIX, ID_KEY, rank_key

# Intervals of polling: the store, a GPU's event, the workers during a broadcast, a group that forms.
STORE_POLL_S = 0.005
EVENT_POLL_S = 0.0005
WORKERS_POLL_S = 2.0
FORM_POLL_S = 0.02
# This process reaches its store at this address. The store listens at all addresses, also IPv6.
ANY_ADDRESS = "0.0.0.0"
# The value of `ID_KEY` with gloo, which needs no id.
NO_ID = b"gloo"


class TrainerGroup:
    """Rank 0 of a group: NCCL on a GPU, gloo on a CPU."""

    def __init__(self, device: Any, world_size: int, *, timeout_s: float):
        """Listens at `port` until `abort`.

        Args:
            device: the torch.device of the tensors.
            timeout_s: of forming the group, and of each broadcast.
        """
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
        # With a host's name of its own, NCCL sends to a worker on the same GPU, through sockets.
        if device.type == "cuda" and "NCCL_HOSTID" not in os.environ:
            self.device_uuid = str(torch.cuda.get_device_properties(device).uuid)

    def form(self, *, should_stop: Callable[[], bool]) -> None:
        """Returns when all ranks have joined. On an error the caller calls `abort`.

        Args:
            should_stop: whether the group can no longer form.

        Raises:
            TimeoutError: a rank did not join in time, or `should_stop()` was true.
            Exception: NCCL or gloo failed.
        """
        deadline = time.monotonic() + self._timeout_s
        while missing := self._missing_ranks():
            if should_stop() or time.monotonic() > deadline:
                raise TimeoutError(
                    f"expected {self._world_size - 1} ranks of workers within {self._timeout_s:g} s, "
                    f"got none of rank {', '.join(map(str, missing))}; see the workers' log"
                )
            time.sleep(STORE_POLL_S)
        make = self._form_nccl if self.backend == "nccl" else self._form_gloo
        what = f"{self.backend} formed no group"
        self._group = within(self._timeout_s, what, make, should_stop)

    def _missing_ranks(self) -> list[int]:
        """The ranks of workers that have not joined yet."""
        ranks = range(1, self._world_size)
        if self._store.check([rank_key(rank) for rank in ranks]):
            return []
        return [rank for rank in ranks if not self._store.check([rank_key(rank)])]

    def _form_gloo(self) -> Any:
        from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

        # A second connection to the store: a wait on it ends when `abort` closes the store.
        store = TCPStore(
            ANY_ADDRESS, self.port, None, False, timeout=self._limit, wait_for_workers=False
        )
        store.set(ID_KEY, NO_ID)
        return ProcessGroupGloo(PrefixStore(GLOO_PREFIX, store), 0, self._world_size, self._limit)

    def _form_nccl(self) -> Any:
        from titopool.client.weights.nccl import Nccl, new_id

        nccl_id = new_id()
        self._store.set(ID_KEY, nccl_id)
        return Nccl(rank=0, world_size=self._world_size, nccl_id=nccl_id, device=self._device)

    def broadcast(self, buffer: Any, *, check_workers: Callable[[], None]) -> Callable[[], Any]:
        """Starts to send `buffer`, contiguous, of shape (elements,).

        Args:
            check_workers: called every `WORKERS_POLL_S` while NCCL sends; may raise.

        Returns:
            A function that waits until the buffer is sent. Until it returns, the caller must not
            change the buffer. It raises what `check_workers` raises.
        """
        if buffer.numel() == 0:
            # The workers receive nothing either.
            return lambda: None
        if self.backend == "nccl":
            self._group.broadcast(buffer, 0)
            event = self._group.stream.record_event()
            return lambda: self._wait_for(event, check_workers)
        return self._broadcast_by_gloo(buffer)

    def _broadcast_by_gloo(self, buffer: Any) -> Callable[[], Any]:
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        # As bytes, because gloo does not know all dtypes.
        wait_for_gloo: Callable[[], Any]
        wait_for_gloo = self._group.broadcast([buffer.view(torch.uint8)], options).wait
        return wait_for_gloo

    def _wait_for(self, event: Any, check_workers: Callable[[], None]) -> None:
        """Waits for a GPU event. NCCL itself would wait forever for a worker that is lost."""
        deadline = time.monotonic() + self._timeout_s
        next_check = time.monotonic() + WORKERS_POLL_S
        while not event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"expected the end of a broadcast within {self._timeout_s:g} s, got none; a "
                    "worker is lost or does not receive: see GET /weights"
                )
            if time.monotonic() > next_check:
                check_workers()
                next_check = time.monotonic() + WORKERS_POLL_S
            time.sleep(EVENT_POLL_S)

    def abort(self) -> None:
        """Aborts what is in flight, leaves the group and closes the port, which workers notice."""
        # A caller may keep an exception whose traceback keeps this object. So the store, which
        # closes with its last reference, is dropped here.
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()


def run_in_thread(do: Callable[[], Any]) -> "Future[Any]":
    """The future result of `do`. Its daemon thread does not keep the process from exiting."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="titopool-client", daemon=True).start()
    return future


def within(
    timeout_s: float, what: str, make: Callable[[], Any], should_stop: Callable[[], bool]
) -> Any:
    """The group that `make` returns. `make` runs in a thread, because nothing can interrupt it.

    Args:
        what: the start of the TimeoutError's text.

    Raises:
        TimeoutError: `make` took longer than `timeout_s`, or `should_stop()` was true. The thread
            still runs; a group that it makes later is aborted.
        BaseException: what `make` raised.
    """
    made = run_in_thread(make)
    deadline = time.monotonic() + timeout_s
    while not made.done() and time.monotonic() < deadline and not should_stop():
        wait([made], FORM_POLL_S)
    if not made.done():
        made.add_done_callback(_abort_group)
        raise TimeoutError(f"{what} within {timeout_s:g} s: a worker is lost or does not answer")
    return made.result()


def _abort_group(made: "Future[Any]") -> None:
    if made.exception() is None:
        made.result().abort()
