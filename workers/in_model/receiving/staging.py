"""Where received weights wait until they are applied.

Runs in: vLLM's processes that hold the model. `Beside` is tried first, then `InKvCache`, then `InHost`,
or `InPlace` if the setting `weight_staging` says so:

- Beside: memory next to the model. Generation goes on while weights arrive.
- InKvCache: the KV cache's memory. Generation must stand before the first byte arrives, and until all
  caches are empty. A commit stops generation and empties the caches in any case, so this adds only
  the transfer to the stop.
- InHost: the host's memory. Generation goes on while weights arrive, and stands while they are
  loaded, both at the speed of PCIe.
- InPlace: nowhere. Chunks are loaded into the model as they come, while generation stands. An update
  that fails then leaves old and new weights.
"""

import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from titopool.wire.pool_state import CacheMode
from titopool.wire.weight_plan import Chunk, message_of, views_of
from workers.in_model.checkpoint_files import Refused
from workers.in_model.receiving.group import Channel
from workers.in_model.receiving.host_memory import (
    ALIGNMENT,
    HostMemory,
    Place,
    free_host_bytes,
)

Item = TypeVar("Item")
# By name.
Tensors = dict[str, Any]

# GPU memory that weights beside the model leave free for the temporary tensors of generation.
SPARE_GPU_BYTES = 2 * 2**30
# Chunks next to the model during an update in place: one is loaded while the other comes.
NUM_IN_PLACE = 2
GIB = 2**30
# Of settings that name several.
ORDERS = {"auto": ("beside", "kv", "host"), "in_place": ("beside", "kv", "in_place")}
# For these, generation stands while tensors come, with empty caches.
STANDING = ("in_place", "kv")


class Staging(Protocol):
    """Memory for the tensors of one update."""

    # In answers and metrics.
    name: str

    def receive(self, channel: Channel, chunk: Chunk, deadline: float) -> Tensors:
        """Begins to receive a chunk; returns its tensors, which are complete after `channel.wait`."""

    def release(self) -> None:
        """Gives the memory back; nothing is being received any more."""


class Beside:
    """A new buffer for each chunk, on the model's device."""

    name = "beside"

    def __init__(self, device: Any):
        self._device = device

    def receive(self, channel: Channel, chunk: Chunk, deadline: float) -> Tensors:
        buffer = new_buffer(chunk.num_bytes, self._device)
        return begin_to_receive(channel, buffer, chunk, deadline)

    def release(self) -> None:
        pass


class InHost:
    """Memory of the host, which the model's device reads and writes."""

    name = "host"

    def __init__(self, memory: HostMemory):
        self._memory = memory
        # By the identity of a chunk.
        self._reserved: dict[int, Place] = {}

    def reserve(self, chunks: Sequence[Chunk]) -> bool:
        """Reserves memory for `chunks`, which `receive` then takes; returns whether they fit."""
        places = self._memory.reserve([chunk.num_bytes for chunk in chunks])
        if places is None:
            return False
        self._reserved.update(zip(map(id, chunks), places, strict=True))
        return True

    def receive(self, channel: Channel, chunk: Chunk, deadline: float) -> Tensors:
        buffer = self._memory.take(self._reserved.pop(id(chunk)))
        return begin_to_receive(channel, buffer, chunk, deadline)

    def release(self) -> None:
        self._memory.free()


class InPlace:
    """Hands each chunk to the model's thread, which loads it; keeps nothing."""

    name = "in_place"

    def __init__(self, device: Any, chunks: Sequence[Chunk]):
        self._device = device
        self._num_chunks = len(chunks)
        self.infos = [piece.tensor for chunk in chunks for piece in chunk.pieces]
        # True: a chunk may come; False: the update has ended.
        self._places: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(NUM_IN_PLACE):
            self._places.put(True)
        # Complete chunks; an error in place of one that did not come.
        self._complete: queue.SimpleQueue[Tensors | Exception] = queue.SimpleQueue()

    def receive(self, channel: Channel, chunk: Chunk, deadline: float) -> Tensors:
        """Receives a chunk once there is a place for it; its tensors are complete."""
        try:
            if not take(self._places, deadline, "the model did not load in time"):
                raise RuntimeError("the update has ended")
            buffer = new_buffer(chunk.num_bytes, self._device)
            received = begin_to_receive(channel, buffer, chunk, deadline)
            channel.wait(deadline)
        except Exception as error:
            self._complete.put(error)
            raise
        self._complete.put(received)
        return received

    def chunks(self, timeout_s: float) -> Iterator[Tensors]:
        """The tensors of each chunk as it comes, for the model's thread.

        Raises:
            Exception: a chunk did not come within `timeout_s` from the first one on.
        """
        import torch

        deadline = time.monotonic() + timeout_s
        for number in range(self._num_chunks):
            tensors = take(self._complete, deadline, "the trainer did not send in time")
            if isinstance(tensors, Exception):
                raise tensors
            if number:
                # The chunk before this one is loaded.
                self._places.put(True)
            if self._device.type == "cuda":
                # The receiver's thread has allocated the memory, and copied tensors, for its stream.
                stream = torch.cuda.current_stream(self._device)
                stream.wait_stream(torch.cuda.default_stream(self._device))
                for tensor in tensors.values():
                    tensor.record_stream(stream)
            yield tensors

    def release(self) -> None:
        self._places.put(False)


class InKvCache:
    """Parts of the KV cache: whole chunks where they fit, else tensors, by way of a bounce buffer."""

    name = "kv"

    def __init__(self, memory: "KvCacheMemory", device: Any):
        self._memory = memory
        self._device = device
        # Of the tensors that `receive` has begun to receive.
        self.names: list[str] = []
        # By the identity of a reserved chunk: its buffer, or those of its tensors.
        self._reserved: dict[int, Any] = {}
        self._bounce: Any = None

    def reserve(self, chunks: Sequence[Chunk], room: int) -> bool:
        """Reserves memory for `chunks`, which `receive` then takes; returns whether they fit.

        Args:
            room: bytes free next to the model, for the bounce buffer and what does not fit.
        """
        largest = max(chunk.num_bytes for chunk in chunks)
        whole = self._memory.reserve([chunk.num_bytes for chunk in chunks])
        if whole is not None:
            self._reserved.update(zip(map(id, chunks), whole, strict=True))
            return True
        sizes = [piece.num_bytes for chunk in chunks for piece in chunk.pieces]
        parts = None if room < largest else self._memory.reserve(sizes, elsewhere=room - largest)
        if parts is None:
            return False
        remaining = iter(parts)
        for chunk in chunks:
            self._reserved[id(chunk)] = [next(remaining) for _ in chunk.pieces]
        return True

    def receive(self, channel: Channel, chunk: Chunk, deadline: float) -> Tensors:
        self.names += [piece.tensor.name for piece in chunk.pieces]
        reserved = self._reserved.pop(id(chunk))
        if not isinstance(reserved, list):
            return begin_to_receive(channel, reserved, chunk, deadline)
        if self._bounce is None or self._bounce.numel() < chunk.num_bytes:
            self._bounce = new_buffer(chunk.num_bytes, self._device)
        buffer = self._bounce[: chunk.num_bytes]
        kept: Tensors = {}
        received = begin_to_receive(channel, buffer, chunk, deadline)
        for (name, tensor), part in zip(received.items(), reserved, strict=True):
            place = new_buffer(tensor.nbytes, self._device) if part is None else part
            kept[name] = place.view(tensor.dtype).view(tensor.shape)
        channel.copy(list(kept.values()), list(received.values()))
        return kept

    def release(self) -> None:
        """Clears what was written: a bit pattern of weights may be NaN as a key or value.

        If nothing came, generation may not have stopped yet: the cache stays as it is.
        """
        self._bounce = None
        self._reserved = {}
        if self.names:
            self._memory.clear()
        self._memory.free()


class KvCacheMemory:
    """The KV cache of one process as bytes, of which parts can be reserved."""

    def __init__(self, kv_caches: Any):
        """
        Args:
            kv_caches: vLLM's, in any nesting of lists and dicts; all of a tensor's memory is the
                cache's.
        """
        self._buffers = list(_storages(kv_caches))
        # Of each buffer: bytes that are reserved, from its begin on.
        self._ends = [0] * len(self._buffers)

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def reserve(self, sizes: Sequence[int], elsewhere: int = -1) -> list[Any] | None:
        """Reserves a part for each size, best fit, the largest first.

        Args:
            sizes: in bytes.
            elsewhere: bytes of parts that may have no memory here.

        Returns:
            The parts (uint8) in the order of `sizes`, None for a part elsewhere; None: no fit, and
            nothing is reserved.
        """
        ends, parts = list(self._ends), dict[int, Any]()
        for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
            size = sizes[index]
            _, chosen = min(
                (
                    (buffer.numel() - ends[number] - size, number)
                    for number, buffer in enumerate(self._buffers)
                    if buffer.numel() - ends[number] >= size
                ),
                default=(0, -1),
            )
            if chosen < 0:
                elsewhere -= size
                if elsewhere < 0:
                    return None
                parts[index] = None
                continue
            begin = ends[chosen]
            parts[index] = self._buffers[chosen][begin : begin + size]
            ends[chosen] = begin + -(-size // ALIGNMENT) * ALIGNMENT
        self._ends = ends
        return [parts[index] for index in range(len(sizes))]

    def clear(self) -> None:
        """Fills the reserved parts with zeros."""
        for buffer, end in zip(self._buffers, self._ends, strict=True):
            buffer[:end].zero_()

    def free(self) -> None:
        """Ends all reservations."""
        self._ends = [0] * len(self._buffers)


def _storages(kv_caches: Any) -> Iterator[Any]:
    """The memory of all tensors in `kv_caches` as uint8, each once."""
    import torch

    seen = set[int]()
    waiting = [kv_caches]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)
        elif isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in seen:
            storage = one.untyped_storage()
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8, device=one.device).set_(storage)


def stagings(setting: str, cache: CacheMode) -> list[str]:
    """The names of the stagings that the setting `weight_staging` allows, in the order of trial."""
    order = ORDERS.get(setting, (setting,))
    standing = [one for one in order if one in STANDING]
    keeping = [one for one in order if one not in STANDING]
    if cache == "clear":
        return list(order)
    return keeping if cache == "keep" else keeping + standing


class StagingRoom:
    """Chooses the staging of each update of one process."""

    def __init__(self, setting: str, device: Any, kv_caches: Any):
        """
        Args:
            kv_caches: vLLM's; None: they may not be used, because others read or write them.
        """
        self._setting = setting
        self._device = device
        self._kv = None if kv_caches is None else KvCacheMemory(kv_caches)
        self._host = HostMemory(device)

    def choose(
        self,
        chunks: Sequence[Chunk],
        extra_bytes: int,
        not_in_place: str = "",
        cache: CacheMode = "clear",
        whole_bytes: int = 0,
    ) -> Staging:
        """The staging for `chunks`; loading them takes `extra_bytes` of GPU memory in addition.

        Args:
            not_in_place: what about the update cannot be loaded in place; empty: it can.
            cache: whether keys and values stay where they are.
            whole_bytes: of all chunks that may come in further lists, these included; 0: none.

        Raises:
            Refused: the setting allows no memory that is large enough.
        """
        num_bytes = sum(chunk.num_bytes for chunk in chunks)
        room = self._num_free() - extra_bytes
        names, kv_bytes = stagings(self._setting, cache), self._kv.num_bytes if self._kv else 0
        if "host" in names and whole_bytes > kv_bytes:
            # Generation would stand from the first list until the last.
            names = [name for name in names if name != "kv"]
        # The next chunk may come before the model's thread has let go of the last one.
        needed_in_place = (NUM_IN_PLACE + 1) * max(chunk.num_bytes for chunk in chunks)
        for name in names:
            if name == "beside" and self.fits_beside(num_bytes + extra_bytes):
                return Beside(self._device)
            if name == "kv" and self._kv is not None and room >= 0:
                staging = InKvCache(self._kv, self._device)
                if staging.reserve(chunks, room):
                    return staging
            if name == "host" and room >= 0:
                in_host = InHost(self._host)
                if in_host.reserve(chunks):
                    return in_host
            if name == "in_place" and not not_in_place and needed_in_place <= room:
                return InPlace(self._device, chunks)
        free = [f"{max(0, room + extra_bytes) / GIB:.1f} GiB are free beside the model"]
        if extra_bytes:
            free.append(f"of which loading takes {extra_bytes / GIB:.1f} GiB")
        if "kv" in names:
            free.append(f"{kv_bytes / GIB:.1f} GiB are in the KV cache")
        if "host" in names:
            free.append(
                f"{self._host.free_bytes() / GIB:.1f} GiB of the host's memory may be taken"
            )
        raise Refused(
            f"expected an update that fits into free memory, got {num_bytes / GIB:.1f} GiB: "
            f"{', '.join(free)} (weight_staging={self._setting}, cache={cache}); "
            f"{self._advice(names, room, needed_in_place, not_in_place, cache)}"
        )

    def _advice(
        self, names: list[str], room: int, needed_in_place: int, not_in_place: str, cache: CacheMode
    ) -> str:
        """What to do about an update that does not fit."""
        advice = [] if names == ["host"] and room >= 0 else ["lower gpu_memory_utilization"]
        if "host" in names and room >= 0:
            advice.append("give the host or its container more memory")
        if "in_place" in names:
            reason = not_in_place or f"three chunks, {needed_in_place / GIB:.1f} GiB,"
            advice.append(
                f"{reason} cannot go in place; send all tensors at once, without a checksum and in "
                "smaller chunks, or set weight_staging to auto, which takes the host's memory"
            )
        elif "host" not in names:
            in_place = (
                ", or to in_place (an update that fails then restarts the worker, which has lost its "
                "weights)"
            )
            advice.append(
                "set weight_staging to auto, which takes the host's memory too"
                + (in_place if cache == "clear" else "")
            )
        if cache == "keep":
            advice.append("let the caches be cleared (cache: prefer_keep or clear)")
        return "; or ".join(advice)

    def fits_beside(self, num_bytes: int) -> bool:
        """Whether the model can generate with so much less memory beside it."""
        spare = SPARE_GPU_BYTES if self._device.type == "cuda" else 0
        return num_bytes + spare < self._num_free()

    def _num_free(self) -> int:
        """Free bytes beside the model."""
        import torch

        if self._device.type != "cuda":
            return free_host_bytes()
        free, _ = torch.cuda.mem_get_info(self._device)
        # torch's cache still holds the memory of the previous update.
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return int(free + cached)


def take(items: "queue.SimpleQueue[Item]", deadline: float, why: str) -> Item:
    """The next of `items`.

    Raises:
        TimeoutError: none came before `deadline` (monotonic), because of `why`.
    """
    try:
        return items.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError(why) from None


def new_buffer(num_bytes: int, device: Any) -> Any:
    """Memory without content."""
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def begin_to_receive(channel: Channel, buffer: Any, chunk: Chunk, deadline: float) -> Tensors:
    """Starts a broadcast into `buffer`; the tensors are complete after `channel.wait`."""
    channel.start(message_of(buffer, chunk))
    if chunk.num_copied_bytes:
        # Some of the tensors are copies of the bytes.
        channel.wait(deadline)
    return tensors_in(buffer, chunk)


def tensors_in(buffer: Any, chunk: Chunk) -> Tensors:
    """The tensors in a chunk's buffer, by name."""
    names = [piece.tensor.name for piece in chunk.pieces]
    return dict(zip(names, views_of(buffer, chunk), strict=True))
