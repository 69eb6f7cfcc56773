"""Counts and sums of durations, as workers report them and as front ends keep them."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from titopool.wire.pool_state import Finite


class Durations(msgspec.Struct):
    """How often something happened, and how long it took together (seconds)."""

    num: int = 0
    seconds: Finite = 0.0

    def add(self, seconds: float) -> None:
        self.num += 1
        self.seconds += seconds


class Distribution(msgspec.Struct):
    """A histogram: the number of values up to each bound, and their sum."""

    # Ascending.
    bounds: Sequence[Finite]
    # Not cumulative; one more than bounds, for the values above the last one.
    counts: list[int] = []
    sum: Finite = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
