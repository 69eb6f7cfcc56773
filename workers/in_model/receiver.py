"""Receives weights beside the running model, and keeps them until they are applied.

Runs in: vLLM's processes that hold the model, in a thread of its own, since joining a group and
receiving block. The model's thread starts it, asks how far it is and takes what it has; it waits
for nothing. Weights stay on the GPU where there is room for all, else in the host's memory.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import Bucket, plan_buckets, views_of
from workers.in_model.group import Group, GroupArgs, listen

logger = logging.getLogger(__name__)

# By name.
Tensors = dict[str, Any]

# Memory of the GPU that staged weights leave free: vLLM's own temporary tensors need some.
SPARE_GPU_BYTES = 2 * 2**30


class Receiver:
    """One session: a group, and the tensors of the update under way."""

    def __init__(self, args: GroupArgs, device: Any):
        """Opens the port if this rank is where the others meet.

        Raises:
            OSError: the port is taken.
        """
        self._args = args
        self._device = device
        self._listening = listen(args)
        self._group: Group | None = None
        self._work: queue.SimpleQueue[tuple[list[Bucket], int] | None] = queue.SimpleQueue()
        self._is_closed = False
        self.is_joined = False
        self.error = ""
        self.num_announced = self.num_received = 0
        self.staged: Tensors = {}
        self._thread = threading.Thread(target=self._run, name="titopool-receive", daemon=True)
        self._thread.start()

    # ---- the model's thread ----------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """How far it is; counts are tensors since `drop`."""
        return {
            "is_joined": self.is_joined,
            "error": self.error,
            "num_announced": self.num_announced,
            "num_received": self.num_received,
        }

    def announce(
        self, tensors: Sequence[TensorInfo], bucket_bytes: int, extra_bytes: int = 0
    ) -> None:
        """These come next; loading them needs `extra_bytes` of the GPU besides."""
        buckets = plan_buckets(tensors, bucket_bytes)
        self.num_announced += len(tensors)
        self._work.put((buckets, extra_bytes))

    def drop(self) -> None:
        """Forgets the tensors of an update that has ended."""
        self.staged = {}
        self.num_announced = self.num_received = 0

    def close(self) -> None:
        """Leaves the group, also amid a broadcast; returns at once."""
        self._is_closed = True
        self.drop()
        self._work.put(None)
        # The receiver's thread may leave the group at any time.
        group = self._group
        if group is not None:
            group.channel.cancel()

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the thread is gone, after at most `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the receiver's thread -------------------------------------------------------

    def _run(self) -> None:
        try:
            args, listening = self._args, self._listening
            self._group = Group(args, self._device, listening, lambda: self._is_closed)
            self._listening = None
            self.is_joined = True
            while (work := self._work.get()) is not None:
                self._receive(self._group, *work)
        except Exception as error:
            if not self._is_closed:
                logger.warning("receiving weights failed", exc_info=True)
                lines = str(error).strip().splitlines() or ["no message"]
                self.error = f"{type(error).__name__}: {lines[0][:300]}"
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._listening is not None:
            self._listening.close()
        group, self._group = self._group, None
        if group is not None:
            group.channel.close()

    def _receive(self, group: Group, buckets: list[Bucket], extra_bytes: int) -> None:
        import torch

        deadline = time.monotonic() + self._args.timeout_s
        stays = self._has_room(extra_bytes + sum(bucket.num_bytes for bucket in buckets))
        started: list[Tensors] = []
        for bucket in buckets:
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
            group.channel.start(buffer)
            if stays:
                # The views are made while the bytes are on their way.
                started.append(tensors_in(buffer, bucket))
            else:
                group.channel.wait(deadline)
                self._stage([tensors_in(buffer.cpu(), bucket)])
        group.channel.wait(deadline)
        # Before the barrier: behind it the client may generate, which ends the update.
        self._stage(started)
        if self._args.protocol == "trl":
            group.barrier(deadline)

    def _has_room(self, num_bytes: int) -> bool:
        import torch

        if self._device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        # What the update before this one used is torch's still.
        reserved = torch.cuda.memory_reserved(self._device)
        free += reserved - torch.cuda.memory_allocated(self._device)
        return bool(num_bytes + SPARE_GPU_BYTES < free)

    def _stage(self, received: list[Tensors]) -> None:
        if self._is_closed:
            return
        for tensors in received:
            self.staged.update(tensors)
            self.num_received += len(tensors)


def tensors_in(buffer: Any, bucket: Bucket) -> Tensors:
    """The tensors in a bucket's buffer, by name."""
    names = [piece.tensor.name for piece in bucket.pieces]
    return dict(zip(names, views_of(buffer, bucket), strict=True))
