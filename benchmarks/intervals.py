"""95 % intervals of ratios, from a few runs each, by Student's t on logarithms."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# The quantile of 97.5 % by degrees of freedom, 1 to 30.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052,
    2.048, 2.045, 2.042,
)  # fmt: skip


class Ratio(NamedTuple):
    """A geometric mean, and where the true ratio is with 95 % confidence."""

    mean: float
    low: float
    high: float


def paired(ratios: Sequence[float]) -> Ratio:
    """The mean of ratios that were measured in pairs; two at least."""
    logs = [math.log(one) for one in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return _around(statistics.mean(logs), error, len(logs) - 1)


def unpaired(over: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Ratio:
    """The product of the means of the groups `over` by that of the groups `below` (Welch 1947).

    Args:
        over: groups of two values at least, which have nothing to do with each other.
    """
    logs = [[math.log(one) for one in group] for group in (*over, *below)]
    means = [statistics.mean(group) for group in logs]
    shares = [statistics.variance(group) / len(group) for group in logs]
    certain = sum(share**2 / (len(group) - 1) for share, group in zip(shares, logs, strict=True))
    freedom = sum(shares) ** 2 / certain if certain else 1
    difference = sum(means[: len(over)]) - sum(means[len(over) :])
    return _around(difference, math.sqrt(sum(shares)), max(1, int(freedom)))


def _around(mean: float, error: float, freedom: int) -> Ratio:
    reach = T_95[min(freedom, len(T_95)) - 1] * error
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))
