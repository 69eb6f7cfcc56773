"""Memory of the host in which weights wait: how much is free, and what a process has taken.

Runs in: vLLM's processes that hold the model. A GPU reads and writes memory that is registered with CUDA
where it is, over PCIe: NCCL receives into it and kernels load from it, so an update needs no memory of
the GPU (NCCL's guide, "Data Pointers").
"""

import logging
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# Of the host's memory, for everything else beside a GPU.
SPARE_BYTES = 4 * 2**30
# Tensors begin at multiples of this, for aligned loads.
ALIGNMENT = 256
# The least that is taken at once: registering takes long for each call.
BLOCK_BYTES = 64 * 2**20
GIB = 2**30
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Has a link for each of the host's GPUs, by its PCI address.
GPUS = Path("/sys/bus/pci/drivers/nvidia")


@dataclass
class Block:
    """Bytes that were taken together."""

    # uint8, of shape (bytes,), as a tensor of the model's device.
    buffer: Any
    # Bytes in use, from the begin on.
    end: int = 0


class HostMemory:
    """Memory of the host for the updates of one process, kept from one update to the next."""

    def __init__(self, device: Any):
        self._device = device
        self._spare = SPARE_BYTES if device.type == "cuda" else 0
        self._blocks: list[Block] = []
        # Bytes that the update in progress may use.
        self._num_reserved = 0
        # Seconds that taking memory has cost since the last update.
        self._seconds = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that this process has taken."""
        return sum(one.buffer.numel() for one in self._blocks)

    def free_bytes(self, num_sharing: int) -> int:
        """Bytes that may still be reserved if `num_sharing` processes of the host reserve as many."""
        available = max(0, free_host_bytes() - self._spare) // num_sharing
        return self.num_bytes + available - self._num_reserved

    def reserve(self, num_bytes: int) -> None:
        """Reserves memory, which `take` then takes."""
        self._num_reserved += num_bytes

    def take(self, num_bytes: int) -> Any:
        """Memory of shape (`num_bytes`,), uint8, of what was reserved; called from one thread.

        Raises:
            MemoryError: other processes have taken the memory meanwhile.
        """
        block = next((one for one in self._blocks if _room_in(one) >= num_bytes), None)
        if block is None:
            block = self._new_block(max(num_bytes, BLOCK_BYTES))
        begin = block.end
        block.end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return block.buffer[begin : begin + num_bytes]

    def _new_block(self, num_bytes: int) -> Block:
        began = time.monotonic()
        # An update in other chunks than the last one does not take twice the memory.
        for block in [one for one in self._blocks if not one.end]:
            if self.num_bytes + num_bytes > self._num_reserved:
                self._blocks.remove(block)
                if self._device.type == "cuda":
                    _cuda("cudaHostUnregister", block.buffer.data_ptr())
        free = free_host_bytes()
        if num_bytes + self._spare // 2 > free:
            raise MemoryError(
                f"expected {num_bytes / GIB:.1f} GiB of the host's memory, got {free / GIB:.1f} GiB "
                "free, as other processes have taken it; give the host or the container more memory"
            )
        block = Block(_new_buffer(num_bytes, self._device))
        self._blocks.append(block)
        self._seconds += time.monotonic() - began
        return block

    def free(self) -> None:
        """Ends the use of all memory, which nobody reads or writes any more, and keeps it."""
        if self._seconds:
            # Others than warnings of vLLM's processes are not logged.
            logger.warning(
                "took %.1f GiB of the host's memory for updates in %.1f s, and keeps them",
                self.num_bytes / GIB, self._seconds,
            )  # fmt: skip
        self._num_reserved, self._seconds = 0, 0.0
        for block in self._blocks:
            block.end = 0


def _room_in(block: Block) -> int:
    return int(block.buffer.numel()) - block.end


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
    """Calls a function of CUDA's runtime; raises its error."""
    import torch

    torch.cuda.check_error(int(getattr(torch.cuda.cudart(), name)(*arguments)))


def free_host_bytes(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Bytes that the host has free, and that its containers' limits (cgroup v2) leave this process.

    Files that the kernel has cached count as free.
    """
    import psutil

    return int(min([psutil.virtual_memory().available, *_left_in(cgroups, own_cgroup)]))


def _left_in(cgroups: Path, own_cgroup: Path) -> Iterator[int]:
    """What the limit of each cgroup above this process leaves."""
    try:
        # Version 2 has one line, `0::/path`.
        (path,) = (
            line.removeprefix("0::")
            for line in own_cgroup.read_text().splitlines()
            if line.startswith("0::")
        )
    except (OSError, ValueError):
        return
    folder = cgroups / path.strip("/")
    for one in (folder, *folder.parents):
        if not one.is_relative_to(cgroups):
            return
        try:
            # "max" is no limit, and the first folder has no file.
            limit = int((one / "memory.max").read_text())
            used = int((one / "memory.current").read_text())
            facts = dict(line.split() for line in (one / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        cached = int(facts.get("inactive_file", 0)) + int(facts.get("active_file", 0))
        yield max(0, limit - used + cached)


def num_sharing(num_receiving: int) -> int:
    """How many of the processes that receive an update share this host's memory, at most.

    Each has a GPU of its own, so no more than the host has; containers see the GPUs of others there.
    """
    return min(num_receiving, sum(1 for _ in GPUS.glob("*:*")) or num_receiving)
