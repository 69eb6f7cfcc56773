"""The engines' own metrics, under vLLM's names with a label `worker`."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from app.pool.link import WorkerView
from titopool.wire.messages import MetricFamily


def engine_text(workers: Iterable[WorkerView]) -> bytes:
    """Prometheus' text: all workers' samples of a metric follow its one HELP and TYPE."""
    found: dict[str, list[MetricFamily]] = {}
    for view in workers:
        if view.engine_metrics is not None:
            for family in view.engine_metrics.families:
                found.setdefault(family.name, []).append(family)
    pieces = []
    for same in found.values():
        pieces.append(same[0].head)
        pieces += [one.samples for one in same]
    return b"".join(pieces)


def left_out_family(workers: Iterable[WorkerView]) -> Metric:
    """How many metrics of an engine are missing because they are too large."""
    family = GaugeMetricFamily(
        "titopool_worker_engine_metrics_left_out",
        "metrics of vLLM that are too large to be sent",
        labels=["worker"],
    )
    for view in workers:
        if view.heartbeat is not None and view.engine_metrics is not None:
            family.add_metric([view.heartbeat.worker_id], view.engine_metrics.num_left_out)
    return family
