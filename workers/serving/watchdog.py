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
        # The longest that the loop has stood, in seconds.
        self.longest_s = 0.0
        # When the loop should show itself next; and until when it could not, as the process was
        # suspended. Each is written by one thread: the loop's, and this one.
        self._due = self._excused_until = time.monotonic()
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
        self.longest_s = max(self.longest_s, self._stood_s)
        late_s = time.monotonic() - self._due
        self._due = time.monotonic() + self._interval_s
        return late_s

    @property
    def _stood_s(self) -> float:
        late_s = time.monotonic() - max(self._due, self._excused_until)
        return late_s if late_s > self._interval_s else 0.0

    def _run(self) -> None:
        wakes_at = time.monotonic() + self._interval_s
        while not self._stopped.wait(self._interval_s):
            if time.monotonic() - wakes_at > self._interval_s:
                # This thread did not run either.
                self._excused_until = time.monotonic()
            wakes_at = time.monotonic() + self._interval_s
            try:
                self._look()
            except Exception:
                logger.exception("the watchdog goes on after an error")

    def _look(self) -> None:
        stood_s, limit_s = self._stood_s, self._limit_s()
        # What the loop does when it goes on, such as to end an update, may lower the limit at once.
        self._allowed_s = max(limit_s, self._allowed_s) if stood_s else limit_s
        self._on_turn(stood_s)
        if stood_s > self._allowed_s:
            self._end(
                f"the event loop has stood for {stood_s:.1f} s, expected {self._allowed_s:g} s at most "
                "(worker_hang_timeout_s)",
                self._loop_thread,
            )
