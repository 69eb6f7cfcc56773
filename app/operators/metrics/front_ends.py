"""Metrics that front ends count, summed over all of this server's."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from app.counts.families import FAMILIES, Family
from app.counts.front_end import Series


def front_end_families(series: Iterable[Series]) -> Iterable[Metric]:
    """A family for each of `FAMILIES`, also for one without samples."""
    by_family: dict[Family, list[Series]] = {family: [] for family in FAMILIES}
    for one in series:
        by_family[one.family].append(one)
    for family, found in by_family.items():
        found.sort(key=lambda one: one.labels)
        yield _histogram(family, found) if family.bounds else _counter(family, found)


def session_families(num_sessions: int, num_bytes: int) -> Iterable[Metric]:
    """What sessions take, in all front ends of this host."""
    yield GaugeMetricFamily("titopool_sessions", "open sessions of agents", num_sessions)
    yield GaugeMetricFamily(
        "titopool_session_bytes", "disk that the turns of sessions take", num_bytes
    )


def _counter(family: Family, series: Iterable[Series]) -> Metric:
    made = CounterMetricFamily(family.name, family.help, labels=family.labels)
    for one in series:
        made.add_metric(one.labels, one.values[0])
    return made


def _histogram(family: Family, series: Iterable[Series]) -> Metric:
    made = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for one in series:
        *counts, total = one.values
        made.add_metric(one.labels, cumulative(family.bounds, counts), total)
    return made


def cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Prometheus' buckets: the number of values up to each bound, and of all."""
    buckets, total = [], 0.0
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
    return buckets
