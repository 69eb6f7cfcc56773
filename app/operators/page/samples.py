"""What the page's charts show of one moment, taken from Prometheus families by their names.

A family that nobody exposes gives no figure, and its chart says so.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

TOKENS = "titopool_worker_completion_tokens_total"
PROMPT_TOKENS = "titopool_worker_prompt_tokens_total"
CACHED_TOKENS = "titopool_worker_cached_tokens_total"
UPDATES = "titopool_worker_weight_updates_total"
UPDATE_S = "titopool_worker_weight_update_seconds"
PAUSED_S = "titopool_worker_weight_paused_seconds"
RUNNING = "titopool_worker_sequences"
WAITING = "titopool_waiting_prompts"
REQUESTS = "titopool_http_requests_total"
FIRST_TOKENS = "titopool_time_to_first_token_seconds_bucket"
COUNTERS = {TOKENS, PROMPT_TOKENS, CACHED_TOKENS, UPDATES, REQUESTS, FIRST_TOKENS}
WANTED = COUNTERS | {UPDATE_S, PAUSED_S, RUNNING, WAITING}

# Routes that clients ask again and again until a server is ready: their 503 is no fault.
PROBES = {"/health/", "/live/", "/liveness/", "/ready/"}
# Samples after whose number a label that was never seen counts from 0. Before, it is one that this
# process has just learned of: its total is no growth.
NUM_LEARNING = 3
# Samples whose first tokens the quantiles are of.
QUANTILE_WINDOW = 5
# Counters that are remembered, with those of workers that have left.
MAX_COUNTERS = 20_000

Labels = frozenset[tuple[str, str]]
# By the name of the samples, then by their labels.
Values = Mapping[str, Mapping[Labels, float]]


class Sample(NamedTuple):
    """Figures of the last interval; None where there is none."""

    # Without those whose family nobody exposes.
    figures: dict[str, float | None]
    # Requests a second that ended with an error, by its code; None: nobody counts requests.
    errors_per_s: dict[str, float] | None
    # Completion tokens a second, by worker.
    worker_tokens_per_s: dict[str, float]


class Sampler:
    """Turns counters into rates: each call compares with the call before."""

    def __init__(self) -> None:
        self._before: dict[str, dict[Labels, float]] = {name: {} for name in COUNTERS}
        self._num_samples = 0
        self._first_tokens: deque[Counter[float]] = deque(maxlen=QUANTILE_WINDOW)

    def sample(self, families: Iterable[Metric], elapsed_s: float) -> Sample:
        """The figures of the last `elapsed_s` seconds."""
        now: dict[str, dict[Labels, float]] = {name: {} for name in WANTED}
        present = set()
        for family in families:
            present.add(family.name)
            if family.name in FAMILIES:
                _add_values(now, family)
        growth = {name: self._growth(name, now) for name in COUNTERS}
        self._num_samples += 1
        prompt_tokens = _sum(growth[PROMPT_TOKENS])
        hits = min(1.0, _sum(growth[CACHED_TOKENS]) / prompt_tokens) if prompt_tokens else None
        by_family: dict[str, dict[str, float | None]] = {
            TOKENS: {"completion_tokens_per_s": _sum(growth[TOKENS]) / elapsed_s},
            PROMPT_TOKENS: {"prompt_tokens_per_s": prompt_tokens / elapsed_s},
            CACHED_TOKENS: {"cache_hits": hits},
            RUNNING: {"running": _sum(now[RUNNING])},
            WAITING: {"waiting": _sum(now[WAITING])},
            FIRST_TOKENS: self._quantiles(growth[FIRST_TOKENS]),
            UPDATES: _updates(now, growth[UPDATES]),
        }
        errors = _by_label(
            {
                labels: number
                for labels, number in growth[REQUESTS].items()
                if dict(labels).get("route") not in PROBES
            },
            "code",
        )
        errors.pop("", None)
        tokens = _by_label(growth[TOKENS], "worker")
        return Sample(
            {
                name: value
                for sample_name, figures in by_family.items()
                if family_of(sample_name) in present
                for name, value in figures.items()
            },
            {code: num / elapsed_s for code, num in errors.items()}
            if family_of(REQUESTS) in present
            else None,
            {worker: num / elapsed_s for worker, num in tokens.items()},
        )

    def _growth(self, name: str, now: Values) -> dict[Labels, float]:
        """How much each counter grew. One that is lower than before has started again at 0."""
        counts_new = self._num_samples >= NUM_LEARNING
        known, growth = self._before[name], {}
        for labels, value in now[name].items():
            before = known.get(labels, 0.0 if counts_new else value)
            growth[labels] = value - before if value >= before else value
        if len(known) > MAX_COUNTERS:
            known.clear()
        if name == UPDATES:
            # A worker that has no such counter any more has restarted, and applied none since.
            answering = now[RUNNING]
            for labels in known.keys() - growth.keys():
                if frozenset({("worker", dict(labels)["worker"])}) in answering:
                    known[labels] = 0.0
        known |= now[name]
        return growth

    def _quantiles(self, growth: Mapping[Labels, float]) -> dict[str, float | None]:
        buckets = Counter[float]()
        for labels, number in growth.items():
            if number:
                buckets[float(dict(labels)["le"])] += number  # type: ignore[assignment]
        self._first_tokens.append(buckets)
        total = sum(self._first_tokens, Counter[float]())
        return {f"first_token_p{100 * q:.0f}_s": quantile(total, q) for q in (0.5, 0.95)}


def family_of(sample_name: str) -> str:
    """The name of the family that has samples of this name."""
    return sample_name.removesuffix("_total").removesuffix("_bucket")


FAMILIES = {family_of(name) for name in WANTED}


def _add_values(values: dict[str, dict[Labels, float]], family: Metric) -> None:
    for sample in family.samples:
        if sample.name in WANTED:
            values[sample.name][frozenset(sample.labels.items())] = sample.value


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """The `q`-quantile of a histogram, as Prometheus' histogram_quantile estimates it.

    Args:
        buckets: how many values are at most each bound, the last of which is infinite.
    """
    bounds = sorted(buckets)
    if not bounds or not (total := buckets[bounds[-1]]):
        return None
    lower, num_before = 0.0, 0.0
    for bound in bounds:
        number = buckets[bound]
        if number >= q * total and number > num_before:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (q * total - num_before) / (number - num_before)
        lower, num_before = bound, number
    return lower


def _updates(now: Values, growth: Mapping[Labels, float]) -> dict[str, float | None]:
    """The longest of the updates that workers applied, in seconds; None if there was none."""
    applied = [
        labels - {("outcome", "applied")}
        for labels, number in growth.items()
        if number and ("outcome", "applied") in labels
    ]
    return {
        figure: max((now[name][one] for one in applied if one in now[name]), default=None)
        for figure, name in (("update_s", UPDATE_S), ("paused_s", PAUSED_S))
    }


def _sum(values: Mapping[Labels, float]) -> float:
    return sum(values.values())


def _by_label(growth: Mapping[Labels, float], label: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for labels, number in growth.items():
        value = dict(labels).get(label, "")
        found[value] = found.get(value, 0.0) + number
    return found
