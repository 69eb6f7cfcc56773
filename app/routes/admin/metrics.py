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
from titopool.wire.messages import Heartbeat, KeyTotals, WorkerCounters

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
        slots = GaugeMetricFamily(
            "titopool_worker_slots", "sequences that the engine can run at once", labels=["worker"]
        )
        for view, beat in answering:
            slots.add_metric([beat.worker_id], beat.facts.max_num_seqs if beat.facts else 0)
            ready.add_metric([beat.worker_id], float(view.phase == "ready"))
            version.add_metric([beat.worker_id], beat.weights.version)
            running.add_metric([beat.worker_id], beat.num_sequences)
        workers = GaugeMetricFamily(
            "titopool_workers", "workers in the pool", value=len(self._views)
        )
        yield from (workers, ready, version, running, slots)
        yield from _front_end_metrics([beat for _, beat in answering])
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
        for name in KeyTotals.__struct_fields__:
            what = name.removeprefix("num_")
            family = CounterMetricFamily(
                f"titopool_worker_key_{what}",
                f"{what.replace('_', ' ')} of a key's clients since the worker's start",
                labels=["worker", "key"],
            )
            for _, beat in answering:
                for key, totals in beat.keys.items():
                    family.add_metric([beat.worker_id, key], getattr(totals, name))
            yield family
        yield from self._update_metrics([beat for _, beat in answering])

    def _update_metrics(self, beats: list[Heartbeat]) -> Iterable[Metric]:
        labels = ["worker", "staging"]
        ended = CounterMetricFamily(
            "titopool_worker_weight_updates",
            "weight updates since the worker's start",
            labels=[*labels, "outcome"],
        )
        lasted = GaugeMetricFamily(
            "titopool_worker_weight_update_seconds",
            "from the begin of the last applied update until the new weights served",
            labels=labels,
        )
        paused = GaugeMetricFamily(
            "titopool_worker_weight_paused_seconds",
            "how long the last applied update paused generation",
            labels=labels,
        )
        for beat in beats:
            for staging, totals in beat.updates.items():
                names = [beat.worker_id, staging]
                ended.add_metric([*names, "applied"], totals.num_applied)
                ended.add_metric([*names, "failed"], totals.num_failed)
                if totals.num_applied:
                    lasted.add_metric(names, totals.update_s)
                    paused.add_metric(names, totals.paused_s)
        yield from (ended, lasted, paused)


def _front_end_metrics(beats: list[Heartbeat]) -> Iterable[Metric]:
    """Sums over all front ends, of the worker that most of them have greeted, and for the longest."""
    if not beats:
        return
    best = max(beats, key=lambda beat: (beat.num_front_ends, beat.front_ends.num_refused))
    totals = best.front_ends
    yield GaugeMetricFamily(
        "titopool_memory_taken_bytes",
        "of the memory budgets of all front ends",
        value=totals.memory_taken,
    )
    yield GaugeMetricFamily(
        "titopool_memory_budget_bytes",
        "the memory budgets of all front ends",
        value=totals.memory_limit,
    )
    yield GaugeMetricFamily(
        "titopool_waiting_prompts",
        "prompts that wait for a worker, in all front ends",
        value=totals.num_waiting,
    )
    refused = CounterMetricFamily(
        "titopool_refused_requests",
        "requests refused since the worker's start",
        labels=["reason"],
    )
    for reason in ("queue_full", "body_too_large", "body_too_slow"):
        refused.add_metric([reason], getattr(totals, f"num_{reason}"))
    yield refused


@blueprint.get("/metrics/")
def metrics() -> Response:
    """Prometheus' text format."""
    link = current_service().link
    link.wait_for_heartbeats()
    registry = CollectorRegistry()
    registry.register(PoolCollector(link.workers))
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
