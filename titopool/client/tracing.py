"""The trainer's trace goes on in the server."""

import sys


def trace_headers() -> dict[str, str]:
    """W3C's `traceparent` and `tracestate` of the current span; empty without one.

    OpenTelemetry is not imported for it: a trainer that traces has done so.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers
