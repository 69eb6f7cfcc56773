"""Receives weights while the model runs, and stages them until they are applied.

Runs in: vLLM's processes that hold the model, in a separate thread, since joining a group and
receiving block. The model's thread starts the receiver, reads its status and takes the staged tensors,
without waiting. Weights are staged on the GPU if all of them fit, else in the host's memory.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import Chunk, message_of, plan_chunks, views_of
from workers.in_model.group import Group, GroupArgs, listen

logger = logging.getLogger(__name__)

# By name.
Tensors = dict[str, Any]

# GPU memory that staged weights leave free for vLLM's temporary tensors.
SPARE_GPU_BYTES = 2 * 2**30


class Receiver:
    """One session: a group, and the staged tensors of the current update."""

    def __init__(self, args: GroupArgs, device: Any):
        """Opens the port if the other ranks connect to this one.

        Raises:
            OSError: the port is taken.
        """
        self._args = args
        self._device = device
        self._listening = listen(args)
        self._group: Group | None = None
        self._work: queue.SimpleQueue[tuple[list[Chunk], int] | None] = queue.SimpleQueue()
        self._is_closed = False
        self.is_joined = False
        self.error = ""
        self.num_announced = self.num_received = 0
        self.staged: Tensors = {}
        self._thread = threading.Thread(target=self._run, name="titopool-receive", daemon=True)
        self._thread.start()

    # ---- the model's thread ----------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The receiver's state; counts are tensors since `drop`."""
        return {
            "is_joined": self.is_joined,
            "error": self.error,
            "num_announced": self.num_announced,
            "num_received": self.num_received,
        }

    def announce(
        self, tensors: Sequence[TensorInfo], chunk_bytes: int, extra_bytes: int = 0
    ) -> None:
        """Receives `tensors` next; loading them will need `extra_bytes` of GPU memory in addition."""
        chunks = plan_chunks(tensors, chunk_bytes)
        self.num_announced += len(tensors)
        self._work.put((chunks, extra_bytes))

    def drop(self) -> None:
        """Drops the tensors of an update that has ended."""
        self.staged = {}
        self.num_announced = self.num_received = 0

    def close(self) -> None:
        """Leaves the group, also during a broadcast; returns at once."""
        self._is_closed = True
        self.drop()
        self._work.put(None)
        # The receiver's thread may set it to None at any time.
        group = self._group
        if group is not None:
            group.channel.cancel()

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the thread has ended; waits at most `timeout_s` for it."""
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

    def _receive(self, group: Group, chunks: list[Chunk], extra_bytes: int) -> None:
        import torch

        deadline = time.monotonic() + self._args.timeout_s
        num_bytes = sum(chunk.num_bytes + chunk.num_copied_bytes for chunk in chunks)
        fits_on_gpu = self._has_room(extra_bytes + num_bytes)
        # Buffers in flight, with their tensors where these are known before the bytes come.
        started: list[tuple[Any, Chunk, Tensors | None]] = []
        for chunk in chunks:
            buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=self._device)
            group.channel.start(message_of(buffer, chunk))
            if fits_on_gpu:
                # Creates the views while the bytes are in flight, unless some are copies.
                views = None if chunk.num_copied_bytes else tensors_in(buffer, chunk)
                started.append((buffer, chunk, views))
            else:
                group.channel.wait(deadline)
                self._stage([tensors_in(buffer.cpu(), chunk)])
        group.channel.wait(deadline)
        # Before the barrier: after it TRL's client may generate, which ends the update.
        self._stage([views or tensors_in(buffer, chunk) for buffer, chunk, views in started])
        if self._args.protocol == "trl":
            group.barrier(deadline)

    def _has_room(self, num_bytes: int) -> bool:
        import torch

        if self._device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        # torch's cache still holds the memory of the previous update.
        reserved = torch.cuda.memory_reserved(self._device)
        free += reserved - torch.cuda.memory_allocated(self._device)
        return bool(num_bytes + SPARE_GPU_BYTES < free)

    def _stage(self, received: list[Tensors]) -> None:
        if self._is_closed:
            return
        for tensors in received:
            self.staged.update(tensors)
            self.num_received += len(tensors)


def tensors_in(buffer: Any, chunk: Chunk) -> Tensors:
    """The tensors in a chunk's buffer, by name; see `views_of`."""
    names = [piece.tensor.name for piece in chunk.pieces]
    return dict(zip(names, views_of(buffer, chunk), strict=True))
