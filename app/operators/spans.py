"""The spans of a front end: one for each HTTP request, and its parts.

The parts are made when the response is written, from times that are noted in any case.
"""

from time import monotonic
from typing import Any

from flask import Flask, Response, g, request

from app.call.open_requests import OpenRequest, current_open_request
from titopool.settings.config import ServerConfig
from titopool.tracing import Span, Traces

# Asked again and again.
UNTRACED = {
    "health.health", "health.live", "health.ready", "metrics.metrics", "requests.requests",
}  # fmt: skip


def init_app(app: Flask, config: ServerConfig) -> Traces | None:
    """Traces all requests but those of probes; None without `otlp_endpoint`."""
    if not config.otlp_endpoint:
        return None
    traces = Traces(config.otlp_endpoint, "titopool-front-end", config.trace_ratio)

    @app.before_request
    def begin() -> None:
        if request.endpoint in UNTRACED:
            return
        route = request.url_rule.rule.rstrip("/") if request.url_rule else ""
        g.span = traces.begin(
            f"{request.method} {route}".rstrip(),
            {name: request.headers[name] for name in ("traceparent", "tracestate")
             if name in request.headers},
            {"http.request.method": request.method, "http.route": route},
            is_server=True,
        )  # fmt: skip
        g.traceparent = traces.traceparent_of(g.span)
        g.began_s = monotonic()

    @app.after_request
    def end_with_response(response: Response) -> Response:
        span = g.pop("span", None)
        if span is None:
            return response
        shown, name, began_s = current_open_request(), g.get("request_id", ""), g.began_s
        answered_s, status = monotonic(), response.status_code
        error = str(g.get("error_code", status)) if status >= 400 else ""

        def end() -> None:
            parts = {} if shown is None else _add_parts(traces, span, shown, began_s, answered_s)
            code = parts.pop("error.type", error)
            traces.end(
                span,
                {"titopool.request_id": name, "http.response.status_code": status, **parts},
                error=code,
            )

        if span.is_recording():
            response.call_on_close(end)
        return response

    return traces


def _add_parts(
    traces: Traces, span: Span, shown: OpenRequest, began_s: float, answered_s: float
) -> dict[str, Any]:
    """Adds the parts of a generating request; returns the attributes of the whole."""
    now_s, pending = monotonic(), shown.pending
    traces.add("read body", span, began_s, shown.began_s)
    if pending is None or shown.submitted_s is None:
        traces.add("check", span, shown.began_s, answered_s)
        return {}
    traces.add("check", span, shown.began_s, shown.submitted_s)
    traces.add(
        "queue", span, shown.submitted_s, pending.placed_s or pending.done_s or now_s,
        {"titopool.workers": sorted(pending.workers)},
    )  # fmt: skip
    traces.add("generate", span, pending.placed_s, pending.done_s or now_s)
    traces.add("answer", span, pending.done_s, now_s)
    return {
        "gen_ai.request.model": pending.model,
        "gen_ai.usage.input_tokens": pending.num_input_tokens,
        "gen_ai.usage.output_tokens": pending.num_tokens,
        "gen_ai.response.finish_reasons": sorted(pending.finish_reasons),
        "titopool.num_prompts": len(pending.jobs),
        "titopool.workers": sorted(pending.workers),
        "titopool.weight_versions": sorted(map(str, pending.weight_versions)),
        **({"error.type": pending.error.code} if pending.error else {}),
    }
