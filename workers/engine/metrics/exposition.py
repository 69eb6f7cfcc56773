"""vLLM's metrics in Prometheus' text format, one by one, with the worker's name.

The worker writes them, because each front end would have to parse and write the samples of all
engines. It sends them every 2 s and only to front ends that were asked for /metrics lately
(`Hello.wants_engine_metrics`): an exposition has about 80 KB and takes 10 ms to write, in pieces, so
that it does not belong into each heartbeat; and an answer on demand would have to wait for the event
loop of the busiest worker, longer than a scrape may take.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from titopool.wire.messages import EngineMetrics, MetricFamily

PREFIX = "vllm:"
# Labels may have names of adapters: a metric may have so many samples, and all so many bytes.
MAX_SAMPLES = 1000
MAX_BYTES = 512 * 1024


class _One:
    """Collects one metric."""

    def __init__(self, metric: Any):
        self._metric = metric

    def collect(self) -> Iterable[Any]:
        yield self._metric


def families_of(worker_id: str, registry: Any = None) -> Iterator[MetricFamily | None]:
    """vLLM's metrics with the label `worker`; None for one that is too large.

    Each is written when it is asked for, in less than a millisecond.

    Args:
        registry: prometheus_client's; None: the global one, which vLLM fills.
    """
    # Imported after `workers/environment.py` has removed PROMETHEUS_MULTIPROC_DIR.
    from prometheus_client import REGISTRY

    registry = registry or REGISTRY
    for metric in registry.collect():
        if metric.name.startswith(PREFIX):
            yield _family(metric, worker_id)


def _family(metric: Any, worker_id: str) -> MetricFamily | None:
    from prometheus_client import generate_latest
    from prometheus_client.core import Metric

    if len(metric.samples) > MAX_SAMPLES:
        return None
    labelled = Metric(metric.name, metric.documentation, metric.type)
    labelled.samples = [
        one._replace(labels={**one.labels, "worker": worker_id}, exemplar=None)
        for one in metric.samples
        # When each series began: Prometheus' text format has no such samples.
        if not one.name.endswith("_created")
    ]
    lines = generate_latest(_One(labelled)).splitlines(keepends=True)
    num_head = next((i for i, line in enumerate(lines) if not line.startswith(b"#")), len(lines))
    return MetricFamily(metric.name, b"".join(lines[:num_head]), b"".join(lines[num_head:]))


def bounded(families: Iterable[MetricFamily | None]) -> EngineMetrics:
    """The message, with as many metrics as `MAX_BYTES` hold, in order."""
    kept, num_left_out, num_bytes = [], 0, 0
    for family in families:
        size = MAX_BYTES if family is None else len(family.head) + len(family.samples)
        if family is None or num_bytes + size > MAX_BYTES:
            num_left_out += 1
        else:
            kept.append(family)
            num_bytes += size
    return EngineMetrics(kept, num_left_out)
