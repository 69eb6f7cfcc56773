"""The receiving side of the groups that carry weights.

Runs in: vLLM's processes that hold the model, in the receiver's thread
(`workers/in_model/receiving/receiver.py`). Two protocols:

- "vllm": that of vLLM's trainers and of `WeightsClient` (`titopool/wire/rendezvous.py`). The trainer
  is rank 0 and listens, or it has passed NCCL's id beforehand.
- "trl": that of TRL's client up to 1.10, with vLLM's classes. Rank 0 is the pool's first worker, the
  trainer has the last rank. A barrier follows every tensor.
"""

import contextlib
import ctypes
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from titopool.wire.rendezvous import GLOO_PREFIX, ID_KEY, nccl_id_in, rank_key

# Interval at which a GPU's event is polled.
POLL_S = 0.0005
# Interval at which a store is polled.
STORE_POLL_S = 0.0005
# Interval at which a rank looks which others are missing.
MISSING_EVERY_S = 0.5
# Seconds of one attempt to reach a store.
ATTEMPT_S = 2.0
# Interval at which the wait for an address that stays silent looks whether the group is closed.
CUT_EVERY_S = 0.2
# How long a former group may keep its port.
PORT_TIMEOUT_S = 2.0
# TRL's rank 0 sets this key when all ranks have joined.
START_KEY = "titopool/start"


def message_key(number: int) -> str:
    """The key at which TRL's rank 0 sets its message `number` for the other workers, as bytes."""
    return f"titopool/told/{number}"


class GroupArgs(msgspec.Struct, frozen=True):
    """The arguments with which a process joins."""

    protocol: str
    backend: str
    host: str
    port: int
    rank: int
    world_size: int
    # Limit of each step: joining, an announced list of tensors.
    timeout_s: float
    # NCCL's id; empty: it comes through the store at `host`, `port`.
    nccl_id: bytes = b""

    @property
    def source(self) -> int:
        """The trainer's rank."""
        return 0 if self.protocol == "vllm" else self.world_size - 1

    @property
    def listens(self) -> bool:
        """Whether the other ranks connect to this one."""
        return self.protocol == "trl" and self.rank == 0


class Filled:
    """Which buffers of a channel are filled; they are filled in the order of their start."""

    def __init__(self) -> None:
        # Of each buffer that was not filled at the last look: whether it is.
        self._waiting: deque[Callable[[], bool]] = deque()

    def add(self, is_filled: Callable[[], bool]) -> None:
        """Adds the next buffer; `is_filled` may be called from any thread and returns at once."""
        self._waiting.append(is_filled)

    def take(self) -> int:
        """How many buffers were filled since the last call; also while another thread adds."""
        num = 0
        while self._waiting and self._waiting[0]():
            self._waiting.popleft()
            num += 1
        return num


class Channel(Protocol):
    """Broadcasts from the trainer."""

    # Of the buffers that were started.
    filled: Filled

    def start(self, buffer: Any) -> None:
        """Begins to receive into `buffer`, of shape (elements,), in the dtype of the broadcast.

        Buffers are filled in the order of the calls.
        """

    def copy(self, targets: list[Any], sources: list[Any]) -> None:
        """Copies tensors out of buffers once these are filled, before the next buffer is."""

    def wait(self, deadline: float) -> None:
        """Returns when all buffers are filled and all copies made.

        Raises:
            Exception: the trainer did not send in time, or the group failed.
        """

    def cancel(self) -> None:
        """Makes a running `wait` raise; may be called from any thread, returns at once."""

    def close(self) -> None:
        """Leaves the group; called from the thread that waits."""


def listen(args: GroupArgs) -> socket.socket | None:
    """The listening socket of the rank to which the others connect; None for other ranks.

    Raises:
        OSError: the port is taken, even after a former group had time to close it.
    """
    if not args.listens:
        return None
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while True:
        try:
            return open_port(args.host, args.port)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens; `::` also takes connections over IPv4.

    Raises:
        OSError: the port is taken.
    """
    is_ipv6 = ":" in host
    opened = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        opened.bind((host, port))
        opened.listen()
    except OSError:
        opened.close()
        raise
    return opened


class Group:
    """A group that this process has joined, with its channel."""

    def __init__(
        self,
        args: GroupArgs,
        device: Any,
        listening: socket.socket | None,
        is_closed: Callable[[], bool],
        on_missing: Callable[[list[int]], None] = lambda ranks: None,
    ):
        """Blocks until all ranks have joined.

        Args:
            on_missing: gets the ranks that are missing, every `MISSING_EVERY_S` until there are none.

        Raises:
            Exception: a rank did not join within `args.timeout_s`, or `is_closed()` is true.
        """
        self._is_closed = is_closed
        self._on_missing = on_missing
        self._deadline = time.monotonic() + args.timeout_s
        self._stateless: Any = None
        self.channel: Channel
        with self._cutting_connections(args):
            if args.protocol == "trl":
                self._join_trl(args, device, listening)
            else:
                self._join_vllm(args, device)

    @contextlib.contextmanager
    def _cutting_connections(self, args: GroupArgs) -> Iterator[None]:
        """Ends calls of the store within the block when the group is closed or too late.

        What listens at the address may stay silent, or have been stopped. torch's store waits for
        its answer without a timeout.
        """
        if args.listens or args.nccl_id:
            yield
            return
        is_done = threading.Event()

        def watch() -> None:
            while not is_done.wait(CUT_EVERY_S):
                if self._is_closed() or time.monotonic() > self._deadline:
                    cut_connections(args.host, args.port)

        watcher = threading.Thread(target=watch, name="titopool-weights-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_done.set()
            watcher.join()

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        """Polls, because a wait within the store cannot be interrupted."""

        def is_over() -> bool:
            return self._is_closed() or time.monotonic() > deadline

        while True:
            try:
                if condition():
                    return
            except RuntimeError:
                # At the deadline the store's connection is cut as well.
                if not is_over():
                    raise
            if is_over():
                raise TimeoutError("the other ranks did not join in time")
            time.sleep(STORE_POLL_S)

    def _reach(self, connect: Callable[[timedelta], Any], limit: timedelta) -> Any:
        """The store that `connect` returns, by attempts of `ATTEMPT_S`; `limit` is its timeout then.

        What listens at the address may be no store: it closes, or answers in another protocol.

        Raises:
            RuntimeError: of torch, when the group is closed or the deadline has passed.
        """
        while True:
            try:
                store = connect(min(limit, timedelta(seconds=ATTEMPT_S)))
            except RuntimeError:
                if self._is_closed() or time.monotonic() > self._deadline:
                    raise
                time.sleep(MISSING_EVERY_S)
            else:
                store.set_timeout(limit)
                return store

    def _wait_to_join(self, condition: Callable[[], bool], store: Any, args: GroupArgs) -> None:
        """As `_wait_until`, and reports which ranks are missing."""
        next_look = 0.0

        def has_all() -> bool:
            nonlocal next_look
            if condition():
                self._on_missing([])
                return True
            if time.monotonic() >= next_look:
                self._on_missing(_missing_ranks(store, args))
                next_look = time.monotonic() + MISSING_EVERY_S
            return False

        self._wait_until(has_all, self._deadline)

    def _join_trl(self, args: GroupArgs, device: Any, listening: socket.socket | None) -> None:
        from torch.distributed import PrefixStore, TCPStore

        limit = timedelta(seconds=args.timeout_s)
        given = {} if listening is None else {"master_listen_fd": listening.detach()}
        # As in vLLM's StatelessProcessGroup.create, which would block in the store.
        connect: Callable[[timedelta], Any] = lambda timeout: TCPStore(  # noqa: E731
            args.host, args.port, None, args.listens,
            timeout=timeout, wait_for_workers=False, use_libuv=False, **given,
        )  # fmt: skip
        store = connect(limit) if args.listens else self._reach(connect, limit)
        self._wait_for_ranks(store, args)
        self._stateless = _raw_group(store, args)
        if args.backend == "nccl":
            self.channel = NcclChannel(self._stateless, device, args.source)
        else:
            self.channel = GlooChannel(PrefixStore(GLOO_PREFIX, store), args)

    def _wait_for_ranks(self, store: Any, args: GroupArgs) -> None:
        """Waits for all ranks before NCCL does, because a wait in NCCL cannot be interrupted."""
        if not args.listens:
            store.set(rank_key(args.rank), b"1")
            self._wait_to_join(lambda: bool(store.check([START_KEY])), store, args)
            return
        others = [rank_key(rank) for rank in range(1, args.source)]
        # When TRL's client connects, its store adds a key whose name is not known here.
        self._wait_to_join(
            lambda: store.num_keys() > len(others) and (not others or store.check(others)),
            store,
            args,
        )
        store.set(START_KEY, b"1")

    def _join_vllm(self, args: GroupArgs, device: Any) -> None:
        from torch.distributed import PrefixStore, TCPStore

        if args.nccl_id:
            # All ranks are in this call now: NCCL waits for a missing one and cannot be stopped.
            self.channel = NcclChannel(_id_group(args, args.nccl_id), device, args.source)
            return
        limit = timedelta(seconds=args.timeout_s)
        # `world_size` registers this rank, for which vLLM's trainers wait. It does not block.
        connect: Callable[[timedelta], Any] = lambda timeout: TCPStore(  # noqa: E731
            args.host, args.port, args.world_size, False, timeout=timeout
        )
        store = self._reach(connect, limit)
        store.set(rank_key(args.rank), b"1")
        # Rank 0 sets the key when all ranks are registered.
        self._wait_to_join(lambda: bool(store.check([ID_KEY])), store, args)
        if args.backend == "nccl":
            group = _id_group(args, nccl_id_in(store.get(ID_KEY)))
            self.channel = NcclChannel(group, device, args.source)
        else:
            self.channel = GlooChannel(PrefixStore(GLOO_PREFIX, store), args)

    def barrier(self, deadline: float) -> None:
        """The barrier of vLLM's stateless group, for which TRL's client waits after each tensor.

        vLLM's implementation cannot be interrupted while it waits, and would keep the port.
        """
        group = self._stateless
        if group is None:
            return
        store = group.store
        if group.rank == 0:
            name = group.broadcast_obj(f"barrier_{uuid.uuid4()}", src=0)
        else:
            key = message_key(group.broadcast_recv_src_counter[0])
            self._wait_until(lambda: bool(store.check([key])), deadline)
            name = group.broadcast_obj(None, src=0)
        ranks = range(group.world_size)
        arrivals = [f"arrival_{name}_{rank}" for rank in ranks]
        departures = [f"departure_{name}_{rank}" for rank in ranks]
        store.set(arrivals[group.rank], b"1")
        self._wait_until(lambda: bool(store.check(arrivals)), deadline)
        store.set(departures[group.rank], b"1")
        if group.rank == 0:
            self._wait_until(lambda: bool(store.check(departures)), deadline)
            name_key = message_key(group.broadcast_send_counter - 1)
            for key in (*arrivals, *departures, name_key):
                store.delete_key(key)


def cut_connections(host: str, port: int) -> None:
    """Shuts down this process's TCP connections to an address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return
    # An IPv6 socket that is connected to an IPv4 address names it so.
    addresses = {prefix + str(info[4][0]) for info in found for prefix in ("", "::ffff:")}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            # The socket is the store's: it is not closed here.
            one = socket.socket(fileno=int(name))
            try:
                # The address of a Unix socket is a string.
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    address, its_port = one.getpeername()[:2]
                    if its_port == port and address in addresses:
                        one.shutdown(socket.SHUT_RDWR)
            finally:
                one.detach()


def _missing_ranks(store: Any, args: GroupArgs) -> list[int]:
    """The workers' ranks that have not come to the store; if all have, the trainer's."""
    # TRL's rank 0 has the store.
    ranks = range(1, args.source if args.protocol == "trl" else args.world_size)
    return [rank for rank in ranks if not store.check([rank_key(rank)])] or [args.source]


def _raw_group(store: Any, args: GroupArgs) -> Any:
    """vLLM's stateless group over `store`, in which rank 0 broadcasts plain bytes to the workers.

    vLLM's class unpickles them, so whoever reaches the store could run any code here.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    class RawGroup(StatelessProcessGroup):  # type: ignore[misc]
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            """Broadcasts NCCL's id, which receivers pass to be filled, or a text (receivers: None)."""
            if self.rank == src:
                raw = obj.encode() if isinstance(obj, str) else bytes(obj.internal)
                self.store.set(message_key(self.broadcast_send_counter), raw)
                # TRL's client reads the pickled object.
                return super().broadcast_obj(obj, src)
            raw = self.store.get(message_key(self.broadcast_recv_src_counter[src]))
            self.broadcast_recv_src_counter[src] += 1
            return raw.decode() if obj is None else _filled(obj, raw)

    return RawGroup(rank=args.rank, world_size=args.world_size, store=store)


def _id_group(args: GroupArgs, nccl_id: bytes) -> Any:
    """vLLM's stateless group without a store: it has received `nccl_id` already, and only that."""
    from vllm.distributed.utils import StatelessProcessGroup

    class IdGroup(StatelessProcessGroup):  # type: ignore[misc]
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            """Fills `obj`, vLLM's empty id."""
            return _filled(obj, nccl_id)

    return IdGroup(rank=args.rank, world_size=args.world_size, store=None)


def _filled(unique_id: Any, raw: bytes) -> Any:
    """`unique_id`, vLLM's ctypes structure, with the bytes `raw`."""
    size = ctypes.sizeof(unique_id.internal)
    if len(raw) != size:
        raise ValueError(f"nccl_id: expected {size} bytes, got {len(raw)}; pass ncclGetUniqueId's")
    ctypes.memmove(ctypes.addressof(unique_id.internal), raw, size)
    return unique_id


def _unpinned_nccl() -> AbstractContextManager[Any]:
    """vLLM's context for communicators that it shares with other processes.

    vLLM sets NCCL variables for its own communicators, with which a trainer's would hang. Versions
    without the context set none.
    """
    from vllm.utils import nccl

    context: Callable[[], AbstractContextManager[Any]]
    context = getattr(nccl, "unpinned_nccl_env", contextlib.nullcontext)
    return context()


class NcclChannel:
    """NCCL on a separate stream, so that generation continues."""

    def __init__(self, group: Any, device: Any, source: int):
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        torch.cuda.set_device(device)
        self.filled = Filled()
        self._source = source
        self._is_cancelled = False
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream), _unpinned_nccl():
            self._communicator = PyNcclCommunicator(group, device=device)
        if self._communicator.disabled:
            # It would receive nothing and raise nothing.
            raise RuntimeError(
                "expected vLLM's NCCL communicator, got one that is disabled; install NCCL and "
                "unset VLLM_DISABLE_PYNCCL"
            )

    def start(self, buffer: Any) -> None:
        import torch

        if buffer.numel() == 0:
            # Sends nothing, at the trainer too.
            self.filled.add(lambda: True)
            return
        # Work in flight on the current stream may still use the buffer's memory.
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        self._communicator.broadcast(buffer, src=self._source, stream=self._stream)
        self.filled.add(self._stream.record_event().query)

    def copy(self, targets: list[Any], sources: list[Any]) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources)

    def wait(self, deadline: float) -> None:
        event = self._stream.record_event()
        while not event.query():
            if self._is_cancelled or time.monotonic() > deadline:
                raise TimeoutError("the trainer did not send in time")
            time.sleep(POLL_S)

    def cancel(self) -> None:
        self._is_cancelled = True

    def close(self) -> None:
        # vLLM aborts the communicator in a thread with a timeout.
        self._communicator.destroy()


class GlooChannel:
    """gloo, for CPUs.

    gloo cannot stop a receive that has begun. So bytes arrive in memory of their own, and what has
    begun outlives the channel.
    """

    def __init__(self, store: Any, args: GroupArgs):
        from torch.distributed import BroadcastOptions, ProcessGroupGloo

        limit = timedelta(seconds=args.timeout_s)
        self.filled = Filled()
        self._group = ProcessGroupGloo(store, args.rank, args.world_size, limit)
        self._options = BroadcastOptions()
        self._options.rootRank = args.source
        self._timeout_s = args.timeout_s
        self._is_cancelled = False
        # Of each receive: the work, the buffer to fill, and the bytes that come.
        self._started: deque[tuple[Any, Any, Any]] = deque()

    def start(self, buffer: Any) -> None:
        import torch

        if buffer.numel() == 0:
            self.filled.add(lambda: True)
            return
        # As bytes, because gloo does not know all dtypes.
        flat = buffer.view(torch.uint8)
        received = torch.empty_like(flat)
        work = self._group.broadcast([received], self._options)
        self._started.append((work, flat, received))
        self.filled.add(work.is_completed)

    def copy(self, targets: list[Any], sources: list[Any]) -> None:
        import torch

        self.wait(time.monotonic() + self._timeout_s)
        torch._foreach_copy_(targets, sources)

    def wait(self, deadline: float) -> None:
        while self._started:
            work, buffer, received = self._started[0]
            while not work.is_completed():
                if self._is_cancelled or time.monotonic() > deadline:
                    raise TimeoutError("the trainer did not send in time")
                time.sleep(POLL_S)
            # Raises the error of a receive that failed.
            work.wait()
            buffer.copy_(received)
            self._started.popleft()

    def cancel(self) -> None:
        self._is_cancelled = True

    def close(self) -> None:
        # The end of the group's last reference would wait for them, and stop the process.
        works = [work for work, *_ in self._started]
        threading.Thread(target=_outlive, args=(self._group, works), daemon=True).start()


def _outlive(group: Any, works: Sequence[Any]) -> None:
    """Keeps `group` until its works have ended, at the latest at their timeout."""
    for work in works:
        with contextlib.suppress(Exception):
            work.wait()
