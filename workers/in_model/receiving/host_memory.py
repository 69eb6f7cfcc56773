"""Memory of the host in which weights wait: how much is free, and what a process has taken.

Runs in: vLLM's processes that hold the model. A GPU reads and writes memory that is registered with CUDA
where it is, over PCIe: NCCL receives into it and kernels load from it, so an update needs no memory of
the GPU (NCCL's guide, "Data Pointers").
"""

import contextlib
import fcntl
import logging
import mmap
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

# Of the host's memory, for everything else beside a GPU.
SPARE_BYTES = 4 * 2**30
# Tensors begin at multiples of this, for aligned loads.
ALIGNMENT = 256
# The least that is taken at once: each call of CUDA's takes long.
BLOCK_BYTES = 64 * 2**20
GIB = 2**30
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Names of the limit, of what is used, and of what of that is cached, by version of cgroups.
CGROUP_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: (
        "memory.limit_in_bytes", "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}  # fmt: skip
# Where the processes of a host, or of containers that share it, say what they are about to take.
CLAIMS = Path("/dev/shm") / f"titopool-weights-{os.getuid()}"
# How long another process may look at them; then they count without it.
LOCK_S = 1.0


@dataclass(eq=False)
class Block:
    """Bytes that are taken together."""

    num_bytes: int
    # uint8, of shape (`num_bytes`,), as a tensor of the model's device; None: not yet taken.
    buffer: Any = None
    # Bytes in use, from the begin on.
    end: int = 0


class Place(NamedTuple):
    """A part of a block."""

    block: Block
    begin: int
    num_bytes: int


class HostMemory:
    """Memory of the host for the updates of one process, kept from one update to the next."""

    def __init__(self, device: Any):
        self._device = device
        self._spare = SPARE_BYTES if device.type == "cuda" else 0
        self._blocks: list[Block] = []
        # The block in which the next part is looked for: those before it have had their turn.
        self._next = 0
        self._claims = Claims()
        # What has been taken since the last update, and the seconds of that.
        self._taken, self._seconds = 0, 0.0

    def free_bytes(self) -> int:
        """Bytes that may still be taken beside those that are, by this process alone."""
        return max(0, free_host_bytes() - self._spare - self._claims.others())

    def reserve(self, sizes: Sequence[int]) -> list[Place] | None:
        """Places for parts of these sizes, which `take` then takes; None: there is no room."""
        blocks, places, number = [*self._blocks], list[Place](), self._next
        ends = [one.end for one in blocks]
        for size in sizes:
            while number < len(blocks) and blocks[number].num_bytes - ends[number] < size:
                number += 1
            if number == len(blocks):
                blocks.append(Block(max(size, BLOCK_BYTES)))
                ends.append(0)
            places.append(Place(blocks[number], ends[number], size))
            ends[number] += -(-size // ALIGNMENT) * ALIGNMENT
        added, unused = blocks[len(self._blocks) :], list[Block]()
        if added:
            # An update in other chunks than the last one does not take memory for both.
            unused = [one for one, end in zip(self._blocks, ends, strict=False) if not end]
        num_new = sum(one.num_bytes for one in added)
        with self._claims.locked():
            if num_new > self.free_bytes() + sum(one.num_bytes for one in unused):
                return None
            self._claims.add(num_new)
        for block, end in zip(blocks, ends, strict=True):
            block.end = end
        for block in unused:
            blocks.remove(block)
            if self._device.type == "cuda":
                _cuda("cudaHostUnregister", block.buffer.data_ptr())
        # Those that are unused were too small, and stand before the first one that is new.
        self._blocks, self._next = blocks, number - len(unused)
        return places

    def take(self, place: Place) -> Any:
        """Memory of shape (`place.num_bytes`,), uint8; called from one thread.

        Raises:
            MemoryError: other processes have taken the memory meanwhile, or CUDA has none.
        """
        block = place.block
        if block.buffer is None:
            began = time.monotonic()
            free = free_host_bytes()
            if block.num_bytes + self._spare // 2 > free:
                raise MemoryError(
                    f"expected {block.num_bytes / GIB:.1f} GiB of the host's memory, got "
                    f"{free / GIB:.1f} GiB free, as other processes have taken it; give the host or "
                    "the container more memory"
                )
            block.buffer = _new_buffer(block.num_bytes, self._device)
            self._claims.add(-block.num_bytes)
            self._taken += block.num_bytes
            self._seconds += time.monotonic() - began
        return block.buffer[place.begin : place.begin + place.num_bytes]

    def free(self) -> None:
        """Ends the use of all memory, which nobody reads or writes any more, and keeps it."""
        if self._taken:
            # Others than warnings of vLLM's processes are not logged.
            logger.warning(
                "took %.1f GiB of the host's memory for updates in %.1f s, and keeps them",
                self._taken / GIB, self._seconds,
            )  # fmt: skip
        self._taken, self._seconds, self._next = 0, 0.0, 0
        self._blocks = [one for one in self._blocks if one.buffer is not None]
        for block in self._blocks:
            block.end = 0
        self._claims.clear()


class Claims:
    """What the processes of a host have reserved for updates and not yet taken.

    Each has a file with a number, and locks it for as long as it lives. Where the folder cannot be
    used, each counts for itself.
    """

    def __init__(self) -> None:
        self._own = 0
        self._adding = threading.Lock()
        self._file: int | None = None
        self._name = f"{uuid.uuid4().hex}.claim"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Within the block, no other process looks or claims, unless one holds the lock for too long."""
        try:
            CLAIMS.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(CLAIMS / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            deadline = time.monotonic() + LOCK_S
            while not _locks(lock) and time.monotonic() < deadline:
                time.sleep(0.001)
            yield
        finally:
            os.close(lock)

    def add(self, num_bytes: int) -> None:
        """Claims so many bytes more; from any thread."""
        with self._adding, contextlib.suppress(OSError):
            self._own += num_bytes
            if self._file is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(CLAIMS / self._name, flags, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX)
            os.pwrite(self._file, b"%20d" % self._own, 0)

    def clear(self) -> None:
        """Claims nothing."""
        if self._own:
            self.add(-self._own)

    def others(self) -> int:
        """Bytes that other living processes claim; forgets those that have ended."""
        return sum(map(self._claim_of, CLAIMS.glob("*.claim")))

    def _claim_of(self, path: Path) -> int:
        if path.name == self._name:
            return 0
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            if not _locks(file):
                return int(os.pread(file, 20, 0) or 0)
            path.unlink(missing_ok=True)
            return 0
        finally:
            os.close(file)


def _locks(file: int) -> bool:
    """Locks a file, if nobody has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _new_buffer(num_bytes: int, device: Any) -> Any:
    import torch

    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    with torch.cuda.device(device):
        _cuda("cudaHostRegister", memory.data_ptr(), num_bytes, 0)
        return torch.as_tensor(_Registered(memory), device=device)


class _Registered:
    """Registered memory by CUDA's array interface, of which torch makes a tensor without a copy."""

    def __init__(self, memory: Any):
        # torch keeps this object, and so the memory.
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape), "typestr": "|u1", "data": (memory.data_ptr(), False),
            "version": 3,
        }  # fmt: skip


def _cuda(name: str, *arguments: int) -> None:
    """Calls a function of CUDA's runtime.

    Raises:
        MemoryError: it failed.
    """
    import torch

    code = int(getattr(torch.cuda.cudart(), name)(*arguments))
    if code:
        raise MemoryError(
            f"expected {name} to succeed, got CUDA's error {code}; raise the limit of locked memory "
            "(ulimit -l), or set weight_staging to another memory"
        )


def free_host_bytes(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Bytes that the host has free, and that its containers' limits (cgroups) leave this process.

    Files that the kernel has cached count as free.
    """
    import psutil

    return int(min([psutil.virtual_memory().available, *_left_in(cgroups, own_cgroup)]))


def _left_in(cgroups: Path, own_cgroup: Path) -> Iterator[int]:
    """What the limit of each cgroup above this process leaves."""
    try:
        lines = [line.split(":", 2) for line in own_cgroup.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers not in ("", "memory"):
            continue
        # Version 2 has one folder and names no controllers.
        version, top = (1, cgroups / "memory") if controllers else (2, cgroups)
        folder = top / path.strip("/")
        for one in (folder, *folder.parents):
            if one.is_relative_to(top):
                yield from _left_by(one, version)


def _left_by(folder: Path, version: int) -> Iterator[int]:
    limit, used, cached = CGROUP_FILES[version]
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        facts = {name: int(value) for name, value in map(str.split, lines)}
        # "max" is no limit, and the first folder of version 2 has no file.
        left = int((folder / limit).read_text()) - int((folder / used).read_text())
    except (OSError, ValueError):
        return
    yield max(0, left + sum(facts.get(one, 0) for one in cached))
