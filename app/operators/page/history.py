"""`GET /metrics/history`: the charts' figures of the last minutes, whichever front end answers.

Runs in: each gunicorn process, a greenlet of its own. The figures are those of `/metrics`, which
are the whole pool's, and all front ends sample at the same times: whole multiples of `INTERVAL_S`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import gevent
from flask import Blueprint, Flask, current_app
from prometheus_client.metrics_core import Metric

from app.call.service import Service, current_service
from app.operators.metrics.exposition import families
from app.operators.page.samples import Sample, Sampler
from app.route.operation import Operation, Query
from app.route.query import query_time
from app.time_slices import sharing_time
from titopool.answers.operators import MetricsHistory

logger = logging.getLogger(__name__)
blueprint = Blueprint("history", __name__)

INTERVAL_S = 2
SPAN_S = 600
EXTENSION = "titopool_history"


class Row(NamedTuple):
    """A sample, and the Unix time that it was taken at, a multiple of `INTERVAL_S`."""

    time_s: int
    sample: Sample


class History:
    """The samples of the last `SPAN_S`."""

    def __init__(self, families: Callable[[], Iterable[Metric]]):
        """`families` are those that this process would expose now."""
        self._families = families
        self._sampler = Sampler()
        self._rows: deque[Row] = deque(maxlen=SPAN_S // INTERVAL_S)
        self._last_s: float | None = None
        self._greenlet: gevent.Greenlet | None = None

    def start(self) -> None:
        """Samples from now on; further calls do nothing."""
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        has_failed = False
        while True:
            gevent.sleep(INTERVAL_S - time.time() % INTERVAL_S)
            try:
                self.take(time.time(), time.monotonic())
            except Exception:
                # A log that grows every two seconds would help nobody.
                if not has_failed:
                    logger.exception("the page's charts miss samples")
                has_failed = True

    def take(self, unix_s: float, monotonic_s: float) -> None:
        """Adds a sample, unless there is one of this time."""
        time_s = round(unix_s / INTERVAL_S) * INTERVAL_S
        if self._rows and time_s <= self._rows[-1].time_s:
            if self._rows[-1].time_s - time_s <= INTERVAL_S:
                return
            # The clock was set back.
            self._rows.clear()
        elapsed_s = monotonic_s - self._last_s if self._last_s is not None else INTERVAL_S
        sample = self._sampler.sample(sharing_time(self._families()), elapsed_s)
        self._last_s = monotonic_s
        self._rows.append(Row(time_s, sample))

    def since(self, time_s: float) -> MetricsHistory:
        """The samples after the Unix time `time_s`, by figure."""
        rows = [row for row in self._rows if row.time_s > time_s]
        last = self._rows[-1].sample if self._rows else None
        counts_errors = last is not None and last.errors_per_s is not None
        errors = [row.sample.errors_per_s or {} for row in rows]
        by_code = {
            code: [one.get(code, 0.0) for one in errors]
            for code in sorted({code for one in errors for code in one})
        }
        return MetricsHistory(
            now=round(time.time(), 3),
            interval_s=INTERVAL_S,
            span_s=SPAN_S,
            time_s=[row.time_s for row in rows],
            figures={
                name: [row.sample.figures.get(name) for row in rows]
                for name in (last.figures if last else ())
            },
            errors_per_s=by_code if counts_errors else None,
            worker_tokens_per_s=last.worker_tokens_per_s if last else {},
        )


def init_app(app: Flask, service: Service) -> None:
    """Makes the history of `service`; it starts with the front end, or at the first request."""
    app.extensions[EXTENSION] = History(lambda: families(service))


@blueprint.get("/metrics/history/")
@Operation(
    query=(Query("since", {"type": "number"}, "only later samples; Unix time"),),
)
def history() -> MetricsHistory:
    """Figures at intervals of two seconds; with `since` in the query only later ones.

    Raises:
        InvalidRequest: `since` is no number.
    """
    current_service()
    kept: History = current_app.extensions[EXTENSION]
    kept.start()
    return kept.since(query_time("since"))
