"""Slots of the engine: which completions it gets now, and which wait here for the next free slots.

The engine starts what it has first come, first served. A completion that waits there takes the next
free slot, also one that is kept for new requests (`titopool/slots.py`). Therefore completions wait
here, and the engine has as many as it has slots besides those kept, and as many more as end within the
time that a message to it takes: a slot that ends is then filled by the engine's next steps.

A step in which a completion begins is no step that only decodes, for which vLLM has CUDA graphs of
their own. With 256 slots and answers of 200 tokens, one begins in nearly each step. So with such
graphs the completions that are held begin together, in one step of several: steps of 8B then took 10
ms on average on an H200, in place of 14 to 16 ms.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from titopool.slots import MAX_NEW, Progress, SlotTable, num_kept

# Engine steps from the end of a completion until the engine can start one that is sent for it.
STEPS_TO_ENGINE = 2
# A window of ends, and how many of them must have ends for slots to become free steadily.
WINDOW_STEPS, NUM_WINDOWS = 4, 3
# Where completions begin together: in one of so many steps, or once this share of the slots is free.
BUNCH_STEPS, BUNCH_SHARE = 8, 0.125
# What a grant takes from a busy front end, and the share of the slots that is wanted ahead at most.
GRANT_S, MAX_AHEAD = 0.05, 0.25
# Share of a step's time that the newest completion counts.
NEWEST = 0.1
# For how many steps a job that passed others is a new one, and for how long the most slots that such
# jobs had at once are kept for the next ones, and what share of all slots at most.
NEW_STEPS, KEEP_S, MAX_KEPT = 32, 1.0, 0.125


class EndRate:
    """How many completions end in an engine step, as far as they end steadily.

    Completions that begin together and are as long end together. Then ends say nothing about the next
    steps, and the rate is 0.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.step_s = 0.0
        self._window_end = 0.0
        self._num_now = 0
        self._windows: deque[int] = deque([0] * NUM_WINDOWS, NUM_WINDOWS)

    def record(self, num_steps: int, took_s: float) -> None:
        """Records that a completion has ended after `num_steps`, which took so long."""
        if not num_steps:
            return
        step_s = took_s / num_steps
        self.step_s += (NEWEST if self.step_s else 1) * (step_s - self.step_s)
        self._turn_over()
        self._num_now += 1

    @property
    def per_step(self) -> float:
        """Ends in a step, by the window with the fewest of the last ones."""
        self._turn_over()
        return min(self._windows) / WINDOW_STEPS

    def _turn_over(self) -> None:
        now, window_s = self._clock(), WINDOW_STEPS * self.step_s
        if now >= self._window_end + NUM_WINDOWS * window_s:
            self._windows.extend([0] * NUM_WINDOWS)
            self._num_now, self._window_end = 0, now + window_s
        while now >= self._window_end and window_s:
            self._windows.append(self._num_now)
            self._num_now = 0
            self._window_end += window_s


class JobSlots:
    """The slots of one job: what the engine asks for each of its completions."""

    def __init__(
        self,
        slots: "EngineSlots",
        table: SlotTable[Any],
        key: Hashable,
        num: int,
        on_progress: Callable[[int], None],
        *,
        is_new: bool,
    ):
        """Enters a job of `num` completions in `table`.

        Args:
            on_progress: called when completions start that may have waited, and with 1 when one ends.
            is_new: whether no other job of its request was sent.
        """
        self._slots, self._table, self.key = slots, table, key
        self._on_progress = on_progress
        self.progress: Progress = table.add(key, num)
        self.is_new = is_new
        # Whether the front end must learn when completions start: it may take them for waiting.
        self.tells_starts = not is_new
        # When it passed others.
        self.passed_s = 0.0
        self._num_taken = 0
        self.is_stopped = False
        self._changed = asyncio.Event()

    def grant(self, num: int) -> None:
        """So many completions may start, as slots become free."""
        self._table.advance(self.key, granted=num)
        self._slots.enter(self)

    def grant_apart(self) -> None:
        """All may start, and the first one starts now: jobs that have all the slots may wait for it."""
        self._table.advance(self.key, granted=self.progress.num)
        self.start(min(1, self.progress.num))
        self._slots.enter(self)

    def start(self, num: int) -> None:
        """Gives slots to `num` completions that were held."""
        self._table.advance(self.key, started=self.progress.started + num)
        self._changed.set()
        if self.tells_starts:
            self._on_progress(0)

    async def take(self) -> bool:
        """Returns once the next completion may start; False if none may any more."""
        while self._num_taken == self.progress.started and not self.is_stopped:
            self._changed.clear()
            await self._changed.wait()
        if self.is_stopped:
            return False
        self._num_taken += 1
        return True

    def give_back(self, num_steps: int, took_s: float) -> None:
        """The engine has ended a completion after `num_steps`, which took so long."""
        self._table.advance(self.key, ended=self.progress.ended + 1)
        self._slots.on_end(self, num_steps, took_s)
        self._on_progress(1)

    def stop(self) -> None:
        """No further completion may start."""
        self.is_stopped = True
        self._changed.set()

    def leave(self) -> None:
        """The job has ended."""
        self._table.remove(self.key)
        self._slots.leave(self)


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


class EngineSlots:
    """Gives an engine's slots to completions, first come, first served; new requests pass."""

    def __init__(
        self,
        num_running: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] = _call_later,
    ):
        """`num_running()`: completions that the engine has; `call_later(seconds, call)`: by `clock`."""
        self.num_slots = 0
        # Whether completions that are held begin together.
        self.bunches = False
        self._num_running = num_running
        self._clock, self._call_later = clock, call_later
        # Until then, slots become free for the next bunch.
        self._bunch_end = 0.0
        self._is_bunch_planned = False
        self._rate = EndRate(clock)
        # First to last; a dict, so that one in the middle leaves as fast.
        self._held: dict[JobSlots, None] = {}
        # Of jobs that passed those that are held.
        self._new: SlotTable[JobSlots] = SlotTable()
        # The most that `_new` ran at once in this while and in the last one.
        self._peak = self._last_peak = 0
        self._peak_end = 0.0

    def enter(self, job: JobSlots) -> None:
        """Starts what a job was granted, or holds it."""
        if not job.progress.num_held:
            return
        job.tells_starts |= not job.is_new or job.progress.started > 0
        self._held[job] = None
        self.fill()
        num = min(job.progress.num_held, MAX_NEW - job.progress.started)
        if job.is_new and num > 0 and self._new.num_running <= self.num_slots // 2:
            self._pass(job, num)
        job.tells_starts |= job.progress.num_held > 0

    def _pass(self, job: JobSlots, num: int) -> None:
        """Starts completions of a new request before all that is held."""
        if job not in self._new:
            self._new.add(job, job.progress.num)
            job.passed_s = self._clock()
        job.start(num)
        at = job.progress
        self._new.advance(job, granted=at.started, started=at.started, ended=at.ended)
        self._note_peak()
        if not job.progress.num_held:
            del self._held[job]

    def leave(self, job: JobSlots) -> None:
        """Forgets a job that has ended."""
        if job in self._new:
            self._new.remove(job)
        self._held.pop(job, None)
        self.fill()

    def on_end(self, job: JobSlots, num_steps: int, took_s: float) -> None:
        """One of a job's completions has ended."""
        self._note_peak()
        if job in self._new:
            self._new.advance(job, ended=job.progress.ended)
        else:
            # The slot of a new request goes to the next one.
            self._rate.record(num_steps, took_s)
        self.fill()

    @property
    def num_wanted_ahead(self) -> int:
        """How many completions front ends should grant beyond the free slots."""
        step_s = self._rate.step_s
        if not step_s:
            return 0
        num_steps = max(2 * STEPS_TO_ENGINE, GRANT_S / step_s)
        return min(int(MAX_AHEAD * self.num_slots), round(self._rate.per_step * num_steps))

    def fill(self) -> None:
        """Starts what is held, as far as slots are free, unless it shall begin with others later."""
        if not self._held or (self.bunches and self._waits_for_bunch()):
            return
        while self._held:
            first = next(iter(self._held))
            num = min(self._num_free(), first.progress.num_held)
            if num > 0:
                first.start(num)
            if first.progress.num_held:
                return
            del self._held[first]

    def _waits_for_bunch(self) -> bool:
        now, num_free = self._clock(), self._num_free()
        if num_free <= 0:
            return True
        if now < self._bunch_end and num_free < BUNCH_SHARE * self.num_slots:
            if not self._is_bunch_planned:
                self._is_bunch_planned = True
                self._call_later(self._bunch_end - now, self._start_bunch)
            return True
        self._bunch_end = now + BUNCH_STEPS * self._rate.step_s
        return False

    def _start_bunch(self) -> None:
        self._is_bunch_planned = False
        self.fill()

    def _num_free(self) -> int:
        """How many slots what is held may take now."""
        self._note_peak()
        num_running, num_new = self._num_running(), self._new.num_running
        if not num_running:
            return max(1, self.num_slots - num_kept(self.num_slots))
        # The engine must not begin one as soon as another ends where they begin together.
        num_more = 0 if self.bunches else round(STEPS_TO_ENGINE * self._rate.per_step)
        kept = num_kept(self.num_slots)
        # New requests pass what is held, until they have half of the slots.
        limit = self.num_slots - (0 if num_new > self.num_slots // 2 else kept)
        peak = min(max(self._peak, self._last_peak), int(MAX_KEPT * self.num_slots))
        limit_of_held = self.num_slots - max(kept, peak)
        return num_more + min(limit - num_running, limit_of_held - (num_running - num_new))

    def _note_peak(self) -> None:
        now = self._clock()
        oldest_s = now - (NEW_STEPS * self._rate.step_s or KEEP_S)
        while (first := next(iter(self._new), None)) is not None and first.passed_s < oldest_s:
            self._new.remove(first)
        if now >= self._peak_end:
            is_late = now >= self._peak_end + KEEP_S
            self._last_peak, self._peak = (0 if is_late else self._peak), 0
            self._peak_end = now + KEEP_S
        self._peak = max(self._peak, self._new.num_running)
