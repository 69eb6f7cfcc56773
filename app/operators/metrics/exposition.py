"""All metrics of the server, as objects or as Prometheus' text.

`families` is what others of this process read again and again: it takes a millisecond and asks no
other process. The text has the engines' metrics besides, which workers send as text: to parse and
write the 5,000 lines of eight engines would take longer than a scrape may.
"""

from collections.abc import Iterable

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from app.call.service import Service
from app.operators.metrics.engines import engine_text, left_out_family
from app.operators.metrics.front_ends import front_end_families, session_families
from app.operators.metrics.pool_totals import pool_families


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def families(service: Service) -> list[Metric]:
    """titopool's own metrics for the whole server; needs no HTTP request."""
    workers = service.link.workers
    found = [*pool_families(workers), left_out_family(workers)]
    if service.counts is not None:
        found += front_end_families(service.counts.series())
        found += session_families(*service.sessions.totals())
    return found


def exposition(service: Service) -> bytes:
    """These and the engines' metrics in Prometheus' text format.

    The first call, and one after a pause of `WANT_METRICS_S`, waits for the engines' at most
    `FIRST_METRICS_S` (both in `app/pool/link.py`); others show what the workers have sent, which is
    2 s old at most.
    """
    service.link.wait_for_heartbeats()
    if service.counts is not None:
        service.link.want_engine_metrics()
    own = generate_latest(_Families(families(service)))
    return own + engine_text(service.link.workers)
