"""A worker's watchdog: a thread that goes on while the event loop stands.

It sends the worker's heartbeats in the loop's place, tells the supervisor that the process runs, and
ends a process whose loop stands for too long: nothing else would end the worker's commands and jobs.
"""

import logging
import threading
import time
from collections.abc import Callable

from workers.process import end_hung

logger = logging.getLogger(__name__)

# Until the thread has ended its turn.
JOIN_TIMEOUT_S = 1.0


class Watchdog:
    """Looks at the loop every `interval_s` from `start` to `stop`, which the loop calls."""

    def __init__(
        self,
        interval_s: float,
        *,
        on_turn: Callable[[float], None],
        limit_s: Callable[[], float],
        end: Callable[[str, int], object] = end_hung,
    ):
        """
        Args:
            on_turn: called in the thread with the seconds for which the loop has stood; 0: it runs.
            limit_s: called in the thread: for how long the loop may stand now.
            end: ends the process; gets the reason and the loop's thread.
        """
        self._interval_s = interval_s
        self._on_turn, self._limit_s, self._end = on_turn, limit_s, end
        # The longest that the loop has stood, in seconds; the thread notes it.
        self.longest_s = 0.0
        # When the loop should show itself next, the seconds since then in which the process could not
        # run, and how often the loop came too late since the thread's last turn: when it was due, when
        # it came, and the seconds for which it stood. Both threads have them, under the lock.
        self._due, self._excused_s = time.monotonic(), 0.0
        self._stands = list[tuple[float, float, float]]()
        self._lock = threading.Lock()
        self._allowed_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="titopool-watchdog", daemon=True)

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        self.loop_runs()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def loop_runs(self) -> float:
        """To be called by the loop every `interval_s`; returns how many seconds late it is."""
        now = time.monotonic()
        with self._lock:
            if stood_s := self._stood_s(now):
                self._stands.append((self._due, now, stood_s))
            late_s = now - self._due
            self._due, self._excused_s = now + self._interval_s, 0.0
        return late_s

    def start_over(self) -> None:
        """To be called by the loop: how long it has stood up to now is forgotten."""
        self.loop_runs()
        with self._lock:
            self._stands.clear()
            self.longest_s = 0.0

    def _stood_s(self, now: float) -> float:
        late_s = now - self._due - self._excused_s
        return late_s if late_s > self._interval_s else 0.0

    def _run(self) -> None:
        wakes_at, cpu_s = time.monotonic() + self._interval_s, time.process_time()
        while not self._stopped.wait(self._interval_s):
            # A turn has one value of the time: whenever the process is suspended, `late_s` has it.
            now, last_cpu_s, cpu_s = time.monotonic(), cpu_s, time.process_time()
            late_s = now - wakes_at
            wakes_at = now + self._interval_s
            # This thread did not run either. On a CPU, the process did: the loop kept Python's lock.
            is_lost = late_s > self._interval_s and cpu_s - last_cpu_s < late_s / 2
            self._note(now - late_s if is_lost else now, now)
            try:
                self._look(now)
            except Exception:
                logger.exception("the watchdog goes on after an error")

    def _note(self, lost_from: float, now: float) -> None:
        """Notes how long the loop has stood, without the time from `lost_from` on."""
        with self._lock:
            # After a suspension either thread runs first.
            for due, came, stood_s in self._stands:
                stood_s -= max(0.0, min(came, now) - max(due, lost_from))
                if stood_s > self._interval_s:
                    self.longest_s = max(self.longest_s, stood_s)
            self._stands.clear()
            self._excused_s += max(0.0, now - max(self._due, lost_from))

    def _look(self, now: float) -> None:
        with self._lock:
            stood_s = self._stood_s(now)
        limit_s = self._limit_s()
        # What the loop does when it goes on, such as to end an update, may lower the limit at once.
        self._allowed_s = max(limit_s, self._allowed_s) if stood_s else limit_s
        try:
            self._on_turn(stood_s)
        finally:
            if stood_s > self._allowed_s:
                self._end(
                    f"the event loop has stood for {stood_s:.1f} s, "
                    f"expected {self._allowed_s:g} s at most (worker_hang_timeout_s)",
                    self._loop_thread,
                )
