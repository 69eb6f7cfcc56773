"""A deadline on the monotonic clock of this process."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Deadline:
    """A time at which waiting ends. It means nothing in another process."""

    # `time.monotonic()` at that time, in seconds.
    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """The deadline that passes `timeout_s` seconds from now."""
        return cls(time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0.0 once it has passed."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.at_s
