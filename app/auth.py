"""The API key: `Authorization: Bearer KEY`, as the openai package sends it."""

import hmac

from flask import Flask, request

from titopool.errors import Unauthorized

# Probes of a container platform have no key.
OPEN_ENDPOINTS = {"health.health", "health.live", "health.ready"}


def init_app(app: Flask, api_key: str) -> None:
    """Guards every route but health with `api_key`; an empty one guards nothing."""
    if not api_key:
        return
    expected = f"Bearer {api_key}".encode()

    @app.before_request
    def check_key() -> None:
        if request.endpoint in OPEN_ENDPOINTS:
            return
        given = request.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, expected):
            came = "another key" if given else "no Authorization header"
            raise Unauthorized(f"expected the header 'Authorization: Bearer <key>', got {came}")
