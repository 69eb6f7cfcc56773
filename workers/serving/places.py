"""Jobs that front ends sent ahead of free slots: they wait here, not in the engine.

The engine starts what it has first come, first served. A job that waits there takes the next free
slot, also one that is kept for new requests (`app/pool/records.py`). While slots become free in
nearly every step, jobs may wait in the engine: it then needs no message to fill a slot, and a new
request waits a few steps behind them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

# Slots become free steadily if no job has ended for at most so many steps.
MAX_QUIET_STEPS = 2


@dataclass(eq=False)
class Place:
    """What a job takes in the engine, and what it waits for."""

    num_sequences: int
    # Whether no other job of its request was sent.
    is_new: bool
    # As in `Generate`, and the engine's slots.
    num_places: int
    num_slots: int
    # Called when the job gets its slots; they must count as taken at once.
    take: Callable[[], None]
    is_free: asyncio.Event = field(default_factory=asyncio.Event)
    # When the engine got the job.
    began: float = 0.0


class Places:
    """Gives free slots to jobs that were sent ahead, first come, first served."""

    def __init__(self, num_running: Callable[[], int], clock: Callable[[], float] = time.monotonic):
        """`num_running()`: completions that have slots, or wait for them in the engine."""
        self._num_running = num_running
        self._clock = clock
        self._waiting: deque[Place] = deque()
        # Completions in flight of new requests.
        self._num_new = 0
        # When the last job ended, how long ends may stay away, and when they stayed away longer.
        self._last_end = self._last_quiet = float("-inf")
        self._max_quiet_s = 0.0
        self._is_steady = False

    def enter(self, place: Place) -> None:
        """Adds a job; `is_free` is set once it may start, which may be now."""
        self._num_new += place.is_new * place.num_sequences
        if place.num_places:
            self._waiting.append(place)
            self._fill()
        else:
            place.is_free.set()

    def leave(self, place: Place) -> None:
        """Removes a job that has ended or was aborted."""
        self._num_new -= place.is_new * place.num_sequences
        if not place.is_free.is_set():
            self._waiting.remove(place)
        self._fill()

    def begin(self, place: Place) -> None:
        """Notes that the engine gets a job now."""
        place.began = self._clock()

    def record_end(self, place: Place, num_steps: int) -> None:
        """Records that a job has ended by itself, before it leaves.

        New requests do not count: they have slots of their own.
        """
        if place.is_new or not num_steps:
            return
        now = self._clock()
        self._max_quiet_s = MAX_QUIET_STEPS * (now - place.began) / num_steps
        if now - self._last_end > self._max_quiet_s:
            self._last_quiet = now
        self._last_end = now
        # Jobs that begin together and are as long end together: then a job's life has a quiet time.
        self._is_steady = place.began >= self._last_quiet

    def _fill(self) -> None:
        while self._waiting and self._has_slots_for(self._waiting[0]):
            first = self._waiting.popleft()
            first.take()
            first.is_free.set()

    def _has_slots_for(self, first: Place) -> bool:
        if self._is_steady and self._clock() - self._last_end <= self._max_quiet_s:
            return True
        num_running = self._num_running()
        # New requests pass those that wait, until they have half of the slots.
        is_half_new = self._num_new > first.num_slots // 2
        limit = first.num_slots if is_half_new else first.num_places
        # A job that is larger than all places runs alone.
        return not num_running or num_running + first.num_sequences <= limit
