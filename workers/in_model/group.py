"""The groups through which weights come, from the receiving side.

Runs in: vLLM's processes, in the receiver's thread (`workers/in_model/receiver.py`). Two protocols:

- "titopool": the trainer is rank 0 and listens; a TCPStore at its address tells the ranks of each
  other, then they are one NCCL communicator or one gloo group.
- "trl": what TRL's client does, with vLLM's own classes: rank 0 is the pool's first worker, the
  trainer comes last; every tensor is followed by a barrier.
"""

import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from titopool.client.trainer_group import GLOO_PREFIX, message_key, rank_key

# Between two looks at a GPU's event.
POLL_S = 0.0005
# Between two looks into a store.
STORE_POLL_S = 0.0005
# How long a group that was left may keep its port.
LET_GO_S = 2.0
# Set by TRL's rank 0 when all are there.
START_KEY = "titopool/start"


class GroupArgs(msgspec.Struct, frozen=True):
    """What a process must know to join."""

    protocol: str
    backend: str
    host: str
    port: int
    rank: int
    world_size: int
    # Seconds that each step of it may take.
    timeout_s: float

    @property
    def source(self) -> int:
        """The trainer's rank."""
        return 0 if self.protocol == "titopool" else self.world_size - 1

    @property
    def listens(self) -> bool:
        """Whether this rank is where the others meet."""
        return self.protocol == "trl" and self.rank == 0


class Channel(Protocol):
    """Broadcasts from the trainer."""

    def start(self, buffer: Any) -> None:
        """Begins to receive into `buffer`; the order is that of the calls."""

    def wait(self, deadline: float) -> None:
        """Returns when all that was started is there.

        Raises:
            Exception: it will not come.
        """

    def cancel(self) -> None:
        """Lets a `wait` under way raise; from any thread, returns at once."""

    def close(self) -> None:
        """Leaves; from the thread that waits."""


def listen(args: GroupArgs) -> socket.socket | None:
    """The socket of the rank at which the others meet.

    Raises:
        OSError: the port is taken, also when the group before had its time to let go of it.
    """
    if not args.listens:
        return None
    give_up = time.monotonic() + LET_GO_S
    while True:
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((args.host, args.port))
            opened.listen()
            return opened
        except OSError:
            opened.close()
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


class Group:
    """A channel, and what keeps it alive."""

    def __init__(
        self,
        args: GroupArgs,
        device: Any,
        listening: socket.socket | None,
        is_closed: Callable[[], bool],
    ):
        """Blocks until all ranks are there, or `is_closed`.

        Raises:
            Exception: they were not within `args.timeout_s`.
        """
        self._is_closed = is_closed
        self._deadline = time.monotonic() + args.timeout_s
        self._stateless: Any = None
        self.channel: Channel
        if args.protocol == "trl":
            self._join_trl(args, device, listening)
        else:
            self._join_titopool(args, device)

    def _until(self, is_so: Callable[[], bool], deadline: float) -> None:
        """Polls: a wait in the store itself can be ended by nobody."""
        while not is_so():
            if self._is_closed() or time.monotonic() > deadline:
                raise TimeoutError("the other ranks did not come in time")
            time.sleep(STORE_POLL_S)

    def _join_trl(self, args: GroupArgs, device: Any, listening: socket.socket | None) -> None:
        from torch.distributed import PrefixStore, TCPStore

        limit = timedelta(seconds=args.timeout_s)
        given = {} if listening is None else {"master_listen_fd": listening.detach()}
        # As vLLM's StatelessProcessGroup.create makes it, but that would wait in it.
        store = TCPStore(
            args.host, args.port, None, args.listens,
            timeout=limit, wait_for_workers=False, use_libuv=False, **given,
        )  # fmt: skip
        self._meet(store, args)
        self._stateless = _raw_group(store, args)
        if args.backend == "nccl":
            self.channel = NcclChannel(self._stateless, device, args.source)
        else:
            self.channel = GlooChannel(PrefixStore(GLOO_PREFIX, store), args)

    def _meet(self, store: Any, args: GroupArgs) -> None:
        """Returns when TRL's client is there: nobody waits in NCCL, which cannot be interrupted."""
        if not args.listens:
            store.set(rank_key(args.rank), b"1")
            self._until(lambda: bool(store.check([START_KEY])), self._deadline)
            return
        others = [rank_key(rank) for rank in range(1, args.source)]
        # The client's store leaves a key of its own, which has no name here, when it connects.
        self._until(
            lambda: store.num_keys() > len(others) and (not others or store.check(others)),
            self._deadline,
        )
        store.set(START_KEY, b"1")

    def _join_titopool(self, args: GroupArgs, device: Any) -> None:
        from torch.distributed import PrefixStore, TCPStore

        limit = timedelta(seconds=args.timeout_s)
        store = TCPStore(args.host, args.port, None, False, timeout=limit, wait_for_workers=False)
        store.set(rank_key(args.rank), b"1")
        ranks = [rank_key(rank) for rank in range(args.world_size)]
        self._until(lambda: bool(store.check(ranks)), self._deadline)
        if args.backend == "nccl":
            self.channel = NcclChannel(_raw_group(store, args), device, args.source)
        else:
            self.channel = GlooChannel(PrefixStore(GLOO_PREFIX, store), args)

    def barrier(self, deadline: float) -> None:
        """What TRL's client waits for after each tensor: the barrier of vLLM's stateless group.

        Its own waits where it could not be interrupted, and would keep the port meanwhile.
        """
        group = self._stateless
        if group is None:
            return
        store = group.store
        if group.rank == 0:
            name = group.broadcast_obj(f"barrier_{uuid.uuid4()}", src=0)
        else:
            key = message_key(group.broadcast_recv_src_counter[0])
            self._until(lambda: bool(store.check([key])), deadline)
            name = group.broadcast_obj(None, src=0)
        ranks = range(group.world_size)
        arrivals = [f"arrival_{name}_{rank}" for rank in ranks]
        departures = [f"departure_{name}_{rank}" for rank in ranks]
        store.set(arrivals[group.rank], b"1")
        self._until(lambda: bool(store.check(arrivals)), deadline)
        store.set(departures[group.rank], b"1")
        if group.rank == 0:
            self._until(lambda: bool(store.check(departures)), deadline)
            told = message_key(group.broadcast_send_counter - 1)
            for key in (*arrivals, *departures, told):
                store.delete_key(key)


def _raw_group(store: Any, args: GroupArgs) -> Any:
    """vLLM's stateless group over `store`, with what rank 0 tells as plain bytes.

    vLLM's own has it pickled, and whoever reaches the store could have it run anything here.
    """
    import ctypes

    from vllm.distributed.utils import StatelessProcessGroup

    class RawGroup(StatelessProcessGroup):  # type: ignore[misc]
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            """Of NCCL's id, which is filled in, or of a text, for which others give None."""
            if self.rank == src:
                raw = obj.encode() if isinstance(obj, str) else bytes(obj.internal)
                self.store.set(message_key(self.broadcast_send_counter), raw)
                # For TRL's client.
                return super().broadcast_obj(obj, src)
            raw = self.store.get(message_key(self.broadcast_recv_src_counter[src]))
            self.broadcast_recv_src_counter[src] += 1
            if obj is None:
                return raw.decode()
            ctypes.memmove(ctypes.addressof(obj.internal), raw, ctypes.sizeof(obj.internal))
            return obj

    return RawGroup(rank=args.rank, world_size=args.world_size, store=store)


class NcclChannel:
    """NCCL on a stream of its own, so that generation goes on meanwhile."""

    def __init__(self, group: Any, device: Any, source: int):
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        torch.cuda.set_device(device)
        self._source = source
        self._is_cancelled = False
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self._communicator = PyNcclCommunicator(group, device=device)

    def start(self, buffer: Any) -> None:
        import torch

        # The buffer's memory may have been given back by work that other streams still do.
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        self._communicator.broadcast(buffer, src=self._source, stream=self._stream)

    def wait(self, deadline: float) -> None:
        event = self._stream.record_event()
        while not event.query():
            if self._is_cancelled or time.monotonic() > deadline:
                raise TimeoutError("the trainer did not send in time")
            time.sleep(POLL_S)

    def cancel(self) -> None:
        self._is_cancelled = True

    def close(self) -> None:
        # Aborts what is under way, in a thread with a limit of its own.
        self._communicator.destroy()


class GlooChannel:
    """gloo: for CPUs."""

    def __init__(self, store: Any, args: GroupArgs):
        from torch.distributed import BroadcastOptions, ProcessGroupGloo

        limit = timedelta(seconds=args.timeout_s)
        self._group = ProcessGroupGloo(store, args.rank, args.world_size, limit)
        self._options = BroadcastOptions()
        self._options.rootRank = args.source
        self._started: list[Any] = []

    def start(self, buffer: Any) -> None:
        self._started.append(self._group.broadcast([buffer], self._options))

    def wait(self, deadline: float) -> None:
        started, self._started = self._started, []
        for work in started:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def cancel(self) -> None:
        with contextlib.suppress(Exception):
            self._group.abort()

    def close(self) -> None:
        self.cancel()
