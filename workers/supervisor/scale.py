"""How many workers a pool should have: what a client asked for, or what waiting prompts need."""

import math
from collections.abc import Sequence

from titopool.settings.config import ServerConfig
from titopool.wire.run_dir import take_wanted
from workers.supervisor.phase_pipe import Load

# A worker leaves only if the others have this share of their slots for all completions.
MAX_SHARE = 0.7


class Scale:
    """The number of workers that is wanted; without a clock: `now` is monotonic, in seconds."""

    def __init__(self, config: ServerConfig, least: int = 1):
        """`least`: so many workers stay, also when clients ask the last ones to leave."""
        self._config = config
        self._least = least
        self.wanted = config.num_workers
        self._waits_since: float | None = None
        self._spare_since: float | None = None

    @property
    def is_automatic(self) -> bool:
        return self._config.max_workers > self._config.num_workers

    def follow(self, loads: Sequence[Load], num_starting: int, now: float) -> None:
        """Sets `wanted`.

        Args:
            loads: the last ones of the workers that are ready.
            num_starting: workers that are not ready yet.
        """
        wanted = take_wanted(self._config.run_dir)
        if wanted is not None:
            self.wanted, self._waits_since, self._spare_since = wanted, None, None
        if self.is_automatic and loads:
            self._follow_load(loads, num_starting, now)

    def _follow_load(self, loads: Sequence[Load], num_starting: int, now: float) -> None:
        # Each front end tells every worker how many prompts wait in it.
        num_waiting = max(load.num_waiting for load in loads)
        num_running, num_slots = sum(load.num_running for load in loads), loads[0].num_slots
        if not num_waiting or num_starting:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since >= self._config.scale_up_after_s:
            self._waits_since = None
            num_more = math.ceil(num_waiting / num_slots)
            # A client may have asked for more than the queue may.
            self.wanted = max(self.wanted, min(self._config.max_workers, len(loads) + num_more))
        is_spare = num_running <= MAX_SHARE * num_slots * (len(loads) - 1)
        if num_waiting or num_starting or not is_spare or len(loads) <= self._config.num_workers:
            self._spare_since = None
        elif self._spare_since is None:
            self._spare_since = now
        elif now - self._spare_since >= self._config.scale_down_after_s:
            self._spare_since = None
            self.wanted = max(self._config.num_workers, len(loads) - 1)

    def forget_one(self) -> None:
        """A worker has left because a client asked it to."""
        self.wanted = max(self._least, self.wanted - 1)
