"""Metrics of the pool: workers, updates, and what front ends tell the workers.

The values are those of the workers' last heartbeats, so any front-end process can answer for the
whole pool.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from app.operators.metrics.front_ends import cumulative
from app.pool.link import WorkerView
from titopool.errors import ERRORS_BY_CODE, ConfigError
from titopool.wire.messages import Heartbeat, KeyTotals, WorkerCounters

ZERO_REFUSALS = {code: 0 for code in ERRORS_BY_CODE if code != ConfigError.code}


def pool_families(views: Sequence[WorkerView]) -> Iterable[Metric]:
    """The workers' values as of their last heartbeats."""
    answering = [(view, view.heartbeat) for view in views if view.heartbeat is not None]
    beats = [beat for _, beat in answering]
    yield GaugeMetricFamily("titopool_workers", "workers in the pool", value=len(views))
    yield from _state_metrics(answering)
    yield from _front_end_metrics(beats)
    yield from _counter_metrics(beats)
    yield from _key_metrics(beats)
    yield from _update_metrics(beats)
    yield from _step_metrics(beats)
    yield _image_metric(beats)
    yield _restart_metric(beats)


def _state_metrics(answering: Iterable[tuple[WorkerView, Heartbeat]]) -> Iterable[Metric]:
    ready = GaugeMetricFamily(
        "titopool_worker_ready", "1 while the worker takes jobs", labels=["worker"]
    )
    phase = GaugeMetricFamily(
        "titopool_worker_phase", "1 for the worker's phase", labels=["worker", "phase"]
    )
    version = GaugeMetricFamily(
        "titopool_worker_weight_version", "version of the worker's weights", labels=["worker"]
    )
    running = GaugeMetricFamily(
        "titopool_worker_sequences", "completions that the engine runs or holds", labels=["worker"]
    )
    slots = GaugeMetricFamily(
        "titopool_worker_slots", "sequences that the engine can run at once", labels=["worker"]
    )
    stood = GaugeMetricFamily(
        "titopool_worker_loop_longest_stand_seconds",
        "the longest that the worker's event loop has stood since its engine was loaded",
        labels=["worker"],
    )
    for view, beat in answering:
        stood.add_metric([beat.worker_id], beat.longest_stand_s)
        slots.add_metric([beat.worker_id], beat.facts.max_num_seqs if beat.facts else 0)
        ready.add_metric([beat.worker_id], float(view.phase == "ready"))
        phase.add_metric([beat.worker_id, view.phase], 1)
        version.add_metric([beat.worker_id], beat.weights.version)
        running.add_metric([beat.worker_id], beat.num_sequences)
    yield from (ready, phase, version, running, slots, stood)


def _counter_metrics(beats: Iterable[Heartbeat]) -> Iterable[Metric]:
    for name in WorkerCounters.__struct_fields__:
        what = name.removeprefix("num_")
        family = CounterMetricFamily(
            f"titopool_worker_{what}",
            f"{what.replace('_', ' ')} since the worker's start",
            labels=["worker"],
        )
        for beat in beats:
            family.add_metric([beat.worker_id], getattr(beat.counters, name))
        yield family


def _key_metrics(beats: Iterable[Heartbeat]) -> Iterable[Metric]:
    for name in KeyTotals.__struct_fields__:
        what = name.removeprefix("num_")
        family = CounterMetricFamily(
            f"titopool_worker_key_{what}",
            f"{what.replace('_', ' ')} of a key's clients since the worker's start",
            labels=["worker", "key"],
        )
        for beat in beats:
            for key, totals in beat.keys.items():
                family.add_metric([beat.worker_id, key], getattr(totals, name))
        yield family


def _update_metrics(beats: list[Heartbeat]) -> Iterable[Metric]:
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


def _step_metrics(beats: Iterable[Heartbeat]) -> Iterable[Metric]:
    phases = SummaryMetricFamily(
        "titopool_worker_weight_phase_seconds",
        "steps of weight updates since the worker's start",
        labels=["worker", "phase"],
    )
    pauses = SummaryMetricFamily(
        "titopool_worker_pause_seconds",
        "pauses of generation that have ended, of clients and updates, since the worker's start",
        labels=["worker", "mode"],
    )
    for beat in beats:
        for family, durations in ((phases, beat.update_phases), (pauses, beat.pauses)):
            for name, one in durations.items():
                family.add_metric([beat.worker_id, name], one.num, one.seconds)
    yield from (phases, pauses)


def _image_metric(beats: Iterable[Heartbeat]) -> Metric:
    family = HistogramMetricFamily(
        "titopool_worker_image_stage_seconds",
        "time for the images of one prompt in a thread; stage: decode or preprocess",
        labels=["worker", "stage"],
    )
    for beat in beats:
        for stage, one in beat.image_stages.items():
            buckets = cumulative(one.bounds, one.counts)
            family.add_metric([beat.worker_id, stage], buckets, one.sum)
    return family


def _restart_metric(beats: Iterable[Heartbeat]) -> Metric:
    family = CounterMetricFamily(
        "titopool_worker_restarts",
        "starts of a worker by the supervisor after the first; reason: why the last process ended",
        labels=["worker", "reason"],
    )
    for beat in beats:
        for reason, number in beat.restarts.items():
            family.add_metric([beat.worker_id, reason], number)
    return family


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
        "prompts that wait for a worker or for memory, in all front ends",
        value=totals.num_waiting,
    )
    refused = CounterMetricFamily(
        "titopool_refused_requests",
        "requests answered with an error since the worker's start; reason: the error's code",
        labels=["reason"],
    )
    # From zero on, so that a rate has the first ones; those named after their status come later.
    for reason, number in sorted((ZERO_REFUSALS | totals.refused).items()):
        refused.add_metric([reason], number)
    yield refused
