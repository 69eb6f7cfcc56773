"""Traces over OTLP, with W3C's context (https://www.w3.org/TR/trace-context/).

Runs in: front ends and workers with the setting `otlp_endpoint`. Nothing of OpenTelemetry is imported
without it. Spans are sent from a thread, under gevent from a greenlet, in small batches; with a
collector that does not answer they are dropped. No span has a prompt, a completion or a key.
"""

import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from titopool.deadline import Deadline
from titopool.errors import ConfigError

logger = logging.getLogger(__name__)

# Of OTLP over HTTP.
TRACES_PATH = "/v1/traces"
# Encoding so many spans takes a front end about 5 ms, in which no other greenlet runs. Fewer cost more
# HTTP requests.
BATCH_SPANS = 256
QUEUE_SPANS = 8192
EXPORT_INTERVAL_MS = 500
EXPORT_TIMEOUT_S = 5.0
WARN_EVERY_S = 60.0
FLUSH_TIMEOUT_S = 1.0
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
# OpenTelemetry's, whose classes are not imported here.
Span = Any


def traces_url(endpoint: str) -> str:
    """Where the collector at `endpoint` takes traces."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(TRACES_PATH) else endpoint + TRACES_PATH


def check_installed(endpoint: str) -> None:
    """Raises ConfigError if there is an `endpoint`, but the extra otel is not installed."""
    if not endpoint:
        return
    try:
        found = importlib.util.find_spec(_EXPORTER) and importlib.util.find_spec(
            "opentelemetry.sdk"
        )
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(
            "otlp_endpoint: expected OpenTelemetry's SDK and exporter, got none; pip install "
            "'titopool[otel]', or leave otlp_endpoint empty"
        )


class Traces:
    """The spans of one process."""

    def __init__(self, endpoint: str, service: str, ratio: float = 1.0):
        """Connects to nothing yet.

        Args:
            service: the process's kind, as the collector shows it.
            ratio: share of the traces that begin here which are recorded. Of others the client
                decides.

        Raises:
            ConfigError: the extra otel is not installed.
        """
        check_installed(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = traces_url(endpoint)
        # Its lines are about each batch; `_Quiet` says the same once a minute.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk.trace.export"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create(
                {
                    "service.name": service,
                    "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
                    "process.pid": os.getpid(),
                }
            ),
            span_limits=SpanLimits(max_attribute_length=256),
            # The process ends by os._exit, after `flush`.
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _quiet(exporter, url),
                max_queue_size=QUEUE_SPANS,
                schedule_delay_millis=EXPORT_INTERVAL_MS,
                max_export_batch_size=BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("titopool")
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self,
        name: str,
        parent: Mapping[str, str] | Span,
        attributes: Attributes | None = None,
        *,
        begin_s: float | None = None,
        is_server: bool = False,
    ) -> Span:
        """A span that `end` ends.

        Args:
            parent: a span, or headers with `traceparent`; without it the span begins a trace.
            begin_s: monotonic time; None: now.
            is_server: the parent is in another process.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        if isinstance(parent, Mapping):
            context = self._propagator.extract(parent, Context())
        else:
            context = set_span_in_context(parent, Context())
        return self._tracer.start_span(
            name,
            context,
            SpanKind.SERVER if is_server else SpanKind.INTERNAL,
            attributes,
            start_time=None if begin_s is None else unix_ns(begin_s),
        )

    def end(
        self,
        span: Span,
        attributes: Attributes | None = None,
        *,
        error: str = "",
        end_s: float | None = None,
    ) -> None:
        """Ends a span.

        Args:
            error: the code of the error that ended it; "": none.
            end_s: monotonic time; None: now.
        """
        span.set_attributes(attributes or {})
        if error:
            from opentelemetry.trace import StatusCode

            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(None if end_s is None else unix_ns(end_s))

    def add(
        self,
        name: str,
        parent: Span,
        begin_s: float | None,
        end_s: float | None,
        attributes: Attributes | None = None,
    ) -> None:
        """Adds a span that has ended; none if a monotonic time is not known."""
        if begin_s is None or end_s is None or not parent.is_recording():
            return
        self.end(self.begin(name, parent, attributes, begin_s=begin_s), end_s=max(begin_s, end_s))

    def traceparent_of(self, span: Span) -> str:
        """W3C's header for what is called within `span`; "": the trace is not recorded."""
        if not span.is_recording():
            return ""
        found = span.get_span_context()
        return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Sends what has ended, as far as it is possible within `timeout_s`."""
        self._provider.force_flush(round(1000 * timeout_s))


def unix_ns(monotonic_s: float) -> int:
    """The Unix time in ns of a time that `time.monotonic` gave."""
    return time.time_ns() - round(1e9 * (time.monotonic() - monotonic_s))


def _quiet(exporter: Any, url: str) -> Any:
    """An exporter that warns once a minute if the collector does not take spans."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Quiet(SpanExporter):
        next_warning = Deadline(0.0)
        num_lost = 0

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            try:
                result: SpanExportResult = exporter.export(spans)
            except Exception as error:
                result, why = SpanExportResult.FAILURE, f" ({type(error).__name__})"
            else:
                why = ""
            if result is not SpanExportResult.SUCCESS:
                self.num_lost += len(spans)
                if self.next_warning.has_passed:
                    self.next_warning = Deadline.after(WARN_EVERY_S)
                    logger.warning(
                        "the collector at %s does not take traces%s; %d spans are lost so far",
                        url, why, self.num_lost,
                    )  # fmt: skip
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return bool(exporter.force_flush(timeout_millis))

    return Quiet()
