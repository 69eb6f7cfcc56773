"""Receives weights while the model runs, and stages them until they are applied.

Runs in: vLLM's processes that hold the model, in a separate thread, since joining a group and
receiving block. The model's thread starts the receiver, reads its status and takes the staged tensors,
without waiting. `workers/in_model/receiving/staging.py` has the memory.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from titopool.wire.weight_plan import Chunk
from workers.in_model.receiving.group import Group, GroupArgs, listen
from workers.in_model.receiving.staging import InPlace, Staging, Tensors

logger = logging.getLogger(__name__)


class Receiver:
    """One session: a group, and the staged tensors of the current update."""

    def __init__(self, args: GroupArgs, device: Any):
        """Opens the port if the other ranks connect to this one.

        Raises:
            OSError: the port is taken.
        """
        self._args = args
        self.timeout_s = args.timeout_s
        self._device = device
        self._listening = listen(args)
        self._group: Group | None = None
        self._work: queue.SimpleQueue[tuple[list[Chunk], Staging] | None] = queue.SimpleQueue()
        self._is_closed = False
        self.is_joined = False
        self.error = ""
        self.num_announced = self.num_received = 0
        self.staged: Tensors = {}
        # Ranks that have not joined; None: NCCL does not tell.
        self._missing_ranks: list[int] | None = None if args.nccl_id else [args.source]
        self._bytes_announced = 0
        # Announced chunks that had not come at the last look, in order, and their totals.
        self._expected: deque[Chunk] = deque()
        self._num_expected = self._bytes_expected = 0
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
            "awaited": self._awaited(),
        }

    def _awaited(self) -> dict[str, Any] | None:
        """What this rank waits for: other ranks, or the first tensor that has not come."""
        waiting = {"rank": self._args.rank}
        if not self.is_joined:
            return {**waiting, "missing_ranks": self._missing_ranks}
        self._count_arrivals()
        if not self._expected:
            return None
        return {
            **waiting,
            "tensor": self._expected[0].pieces[0].tensor.name,
            "num_received": self.num_announced - self._num_expected,
            "num_announced": self.num_announced,
            "bytes_received": self._bytes_announced - self._bytes_expected,
            "bytes_announced": self._bytes_announced,
        }

    def _count_arrivals(self) -> None:
        # The receiver's thread may set it to None at any time.
        group = self._group
        num_filled = 0 if group is None else group.channel.filled.take()
        for _ in range(min(num_filled, len(self._expected))):
            self._count_expected([self._expected.popleft()], -1)

    def _count_expected(self, chunks: Iterable[Chunk], sign: int) -> None:
        for chunk in chunks:
            self._num_expected += sign * len(chunk.pieces)
            self._bytes_expected += sign * chunk.num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether all announced tensors have been received."""
        return self.num_received == self.num_announced

    def announce(self, chunks: list[Chunk], staging: Staging) -> None:
        """Receives `chunks` next, into `staging`."""
        self.num_announced += sum(len(chunk.pieces) for chunk in chunks)
        self._bytes_announced += sum(chunk.num_bytes for chunk in chunks)
        self._expected.extend(chunks)
        self._count_expected(chunks, 1)
        self._work.put((chunks, staging))

    def drop(self) -> None:
        """Drops the tensors of an update that has ended."""
        self.staged = {}
        self.num_announced = self.num_received = self._bytes_announced = 0

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
            self._group = Group(
                args, self._device, listening, lambda: self._is_closed, self._set_missing
            )
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

    def _set_missing(self, ranks: list[int]) -> None:
        self._missing_ranks = ranks

    def _leave(self) -> None:
        if self._listening is not None:
            self._listening.close()
        group, self._group = self._group, None
        if group is not None:
            group.channel.close()

    def _receive(self, group: Group, chunks: list[Chunk], staging: Staging) -> None:
        deadline = time.monotonic() + self._args.timeout_s
        if isinstance(staging, InPlace):
            for chunk in chunks:
                self.num_received += len(staging.receive(group.channel, chunk, deadline))
            return
        # The views are made while the bytes are in flight.
        received = []
        for chunk in chunks:
            # Taking the host's memory takes seconds for each 10 GB.
            if self._is_closed or time.monotonic() > deadline:
                raise TimeoutError("the update has ended, or its memory was not taken in time")
            received.append(staging.receive(group.channel, chunk, deadline))
        group.channel.wait(deadline)
        # Before the barrier: after it TRL's client may generate, which ends the update.
        self._stage(received)
        if self._args.protocol == "trl":
            group.barrier(deadline)

    def _stage(self, received: list[Tensors]) -> None:
        if self._is_closed:
            return
        for tensors in received:
            self.staged.update(tensors)
            self.num_received += len(tensors)
