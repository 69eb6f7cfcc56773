"""`GET /metrics`: the pool in Prometheus' text format.

The values are those of the workers' last heartbeats, so any front-end process can answer for the
whole pool.
"""

from collections.abc import Iterable

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.pool.link import WorkerView
from app.service import current_service
from titopool.wire.messages import WorkerCounters

blueprint = Blueprint("metrics", __name__)


class PoolCollector(Collector):
    """Collects the workers' values as of their last heartbeats."""

    def __init__(self, views: Iterable[WorkerView]):
        self._views = list(views)

    def collect(self) -> Iterable[Metric]:
        answering = [(view, view.heartbeat) for view in self._views if view.heartbeat is not None]
        ready = GaugeMetricFamily(
            "titopool_worker_ready", "1 while the worker takes jobs", labels=["worker"]
        )
        version = GaugeMetricFamily(
            "titopool_worker_weight_version", "version of the worker's weights", labels=["worker"]
        )
        running = GaugeMetricFamily(
            "titopool_worker_sequences", "completions in flight", labels=["worker"]
        )
        for view, beat in answering:
            ready.add_metric([beat.worker_id], float(view.phase == "ready"))
            version.add_metric([beat.worker_id], beat.weights.version)
            running.add_metric([beat.worker_id], beat.num_sequences)
        workers = GaugeMetricFamily(
            "titopool_workers", "workers in the pool", value=len(self._views)
        )
        yield from (workers, ready, version, running)
        for name in WorkerCounters.__struct_fields__:
            what = name.removeprefix("num_")
            family = CounterMetricFamily(
                f"titopool_worker_{what}",
                f"{what.replace('_', ' ')} since the worker's start",
                labels=["worker"],
            )
            for _, beat in answering:
                family.add_metric([beat.worker_id], getattr(beat.counters, name))
            yield family


@blueprint.get("/metrics/")
def metrics() -> Response:
    """Prometheus' text format."""
    link = current_service().link
    link.wait_for_heartbeats()
    registry = CollectorRegistry()
    registry.register(PoolCollector(link.workers))
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
