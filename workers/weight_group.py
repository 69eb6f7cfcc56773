"""The groups through which weights come, from the receiving side.

Runs in: vLLM's processes, in the receiver's thread (`workers/weight_receiver.py`). Two protocols:

- "titopool": the trainer is rank 0 and listens; a TCPStore at its address tells the ranks of each
  other, then they are one NCCL communicator or one gloo group.
- "trl": what TRL's client does, with vLLM's own classes: rank 0 is the pool's first worker, the
  trainer comes last; every tensor is followed by a barrier.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import msgspec

# Between two looks at a GPU's event.
POLL_S = 0.0005
# What ranks of the titopool protocol find each other by in the store.
NCCL_ID_KEY = "titopool/nccl-id"
GLOO_PREFIX = "titopool/gloo"


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

    def close(self) -> None:
        """Gives up at once, from any thread; a `wait` under way raises."""


def listen(args: GroupArgs) -> socket.socket | None:
    """The socket of the rank at which the others meet.

    Raises:
        OSError: the port is taken.
    """
    if not args.listens:
        return None
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((args.host, args.port))
        opened.listen()
    except OSError:
        opened.close()
        raise
    return opened


class Group:
    """A channel, and what keeps it alive."""

    def __init__(self, args: GroupArgs, device: Any, listening: socket.socket | None):
        """Blocks until all ranks are there.

        Raises:
            Exception: they were not within `args.timeout_s`.
        """
        self.source = args.source
        self._stateless: Any = None
        self.channel: Channel
        if args.protocol == "trl":
            self._join_trl(args, device, listening)
        else:
            self._join_titopool(args, device)

    def _join_trl(self, args: GroupArgs, device: Any, listening: socket.socket | None) -> None:
        from torch.distributed import PrefixStore
        from vllm.distributed.utils import StatelessProcessGroup

        self._stateless = StatelessProcessGroup.create(
            host=args.host,
            port=args.port,
            rank=args.rank,
            world_size=args.world_size,
            store_timeout=max(1, int(args.timeout_s)),
            listen_socket=listening,
        )
        if args.backend == "nccl":
            self.channel = NcclChannel(self._stateless, device, args.source)
        else:
            store = PrefixStore(GLOO_PREFIX, self._stateless.store)
            self.channel = GlooChannel(store, args)

    def _join_titopool(self, args: GroupArgs, device: Any) -> None:
        from torch.distributed import PrefixStore, TCPStore

        limit = timedelta(seconds=args.timeout_s)
        store = TCPStore(args.host, args.port, None, False, timeout=limit, wait_for_workers=False)
        # Nobody waits in NCCL, which cannot be interrupted, before all have come so far.
        store.set(f"titopool/rank/{args.rank}", b"1")
        store.wait([f"titopool/rank/{rank}" for rank in range(args.world_size)])
        if args.backend == "nccl":
            self.channel = NcclChannel(_raw_group(store, args), device, args.source)
        else:
            self.channel = GlooChannel(PrefixStore(GLOO_PREFIX, store), args)

    def barrier(self, timeout_s: float) -> None:
        """TRL's client waits for all ranks after each tensor."""
        if self._stateless is not None:
            self._stateless.barrier(timeout=timeout_s)


def _raw_group(store: Any, args: GroupArgs) -> Any:
    """vLLM's stateless group over the trainer's store, which holds NCCL's id as plain bytes."""
    import ctypes

    from vllm.distributed.utils import StatelessProcessGroup

    class RawGroup(StatelessProcessGroup):  # type: ignore[misc]
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            raw = self.store.get(NCCL_ID_KEY)
            ctypes.memmove(ctypes.addressof(obj.internal), raw, len(raw))
            return obj

    return RawGroup(rank=args.rank, world_size=args.world_size, store=store)


class NcclChannel:
    """NCCL on a stream of its own, so that generation goes on meanwhile."""

    def __init__(self, group: Any, device: Any, source: int):
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        torch.cuda.set_device(device)
        self._source = source
        self._is_closed = False
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
            if self._is_closed or time.monotonic() > deadline:
                self.close()
                raise TimeoutError("the trainer did not send in time")
            time.sleep(POLL_S)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
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

    def close(self) -> None:
        abort: Callable[[], None] = getattr(self._group, "abort", lambda: None)
        with contextlib.suppress(Exception):
            abort()
