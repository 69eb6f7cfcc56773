"""The HTTP front end: one Flask application in each gunicorn process.

A handler checks a request, passes its jobs to the link (`app/pool/link.py`) and waits for the
results. Only this package imports Flask.
"""

from collections.abc import Callable
from typing import Any

from flask import Flask

from app import (
    anthropic,
    generate,
    openai,
    operators,
    responses,
    sessions,
    sglang,
    trl,
    vllm,
    vllm_rl,
    weights,
)
from app.call import open_requests
from app.call.service import Service
from app.conversations import access
from app.counts import http_requests
from app.http import (
    auth,
    browsers,
    connections,
    errors,
    idempotency,
    request_bodies,
    request_ids,
)
from app.http import responses as http_responses
from app.http.keys import Keys
from app.operators import spans
from app.operators.page import history
from titopool.settings.config import ServerConfig
from titopool.settings.sources import from_environment


def _as_it_is(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


def create_app(config: ServerConfig | None = None) -> Flask:
    """The WSGI application; `Service.start` or the first request connects it to the workers.

    Args:
        config: the settings; None: those of the environment.

    Raises:
        ConfigError: a setting is unknown or impossible, or the file of keys cannot be used.
    """
    config = config or from_environment()
    app = Flask(__name__, static_folder=None)
    app.url_map.strict_slashes = False
    # None is a coroutine; Flask would look at every hook and handler for that, at each request.
    app.ensure_sync = _as_it_is  # type: ignore[method-assign]
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes
    service = Service(config)
    app.extensions["titopool"] = service
    if service.counts is not None:
        http_requests.init_app(app, service.counts)
    http_responses.init_app(app)
    request_ids.init_app(app)
    service.traces = spans.init_app(app, config)
    connections.init_app(app, config.client_timeout_s)
    request_bodies.init_app(app, config, service.budget)
    keys = Keys(config)
    if not keys.guard_generation:
        browsers.init_app(app, config.host, config.allowed_hosts)
    auth.init_app(app, keys, access.find_maker, access.enter_session)
    errors.init_app(app, service.refused)
    app.register_blueprint(generate.blueprint)
    for protocol in (
        trl,
        openai,
        responses,
        anthropic,
        vllm,
        vllm_rl,
        sglang,
        weights,
        sessions,
        operators,
    ):
        for blueprint in protocol.BLUEPRINTS:
            app.register_blueprint(blueprint)
    history.init_app(app, service)
    idempotency.init_app(app, config)
    open_requests.init_app(app, service.requests)
    return app
