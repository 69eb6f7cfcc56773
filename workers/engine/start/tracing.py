"""vLLM's own spans, below those of the worker."""

import os
from collections.abc import MutableMapping
from typing import Any

from titopool.settings.config import ServerConfig
from titopool.tracing import check_installed, traces_url


def trace_requests(
    engine_args: Any, config: ServerConfig, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Lets vLLM send a span for each request that brings `trace_headers`, with the setting.

    vLLM measures a request's times for it (`disable_log_stats`).

    Raises:
        ConfigError: the extra otel is not installed.
    """
    if not config.otlp_endpoint:
        return
    check_installed(config.otlp_endpoint)
    engine_args.disable_log_stats = False
    if engine_args.otlp_traces_endpoint is None:
        engine_args.otlp_traces_endpoint = traces_url(config.otlp_endpoint)
        # vLLM's default is gRPC.
        environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    environ.setdefault("OTEL_SERVICE_NAME", "titopool-engine")
