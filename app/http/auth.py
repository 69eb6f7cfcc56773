"""Checks the header `Authorization: Bearer KEY`, as the openai package sends it."""

import hmac

from flask import Flask, request

from titopool.errors import Unauthorized

# Probes of container platforms send no key.
OPEN_ENDPOINTS = {"health.health", "health.live", "health.ready"}
# The blueprints of all routes that change the model or pause generation.
ADMIN_BLUEPRINTS = {"weights", "vllm_rl"}


def init_app(app: Flask, api_key: str, admin_key: str) -> None:
    """Requires `admin_key` on administrative routes and `api_key` on all others but health.

    An empty `api_key` protects no route. An empty `admin_key` means that `api_key` protects the
    administrative routes too. The `admin_key` opens all routes.
    """

    @app.before_request
    def check_key() -> None:
        endpoint = request.endpoint or ""
        is_admin = bool(admin_key) and endpoint.partition(".")[0] in ADMIN_BLUEPRINTS
        expected = admin_key if is_admin else api_key
        if not expected or endpoint in OPEN_ENDPOINTS:
            return
        given = request.headers.get("Authorization", "").encode("latin-1", "replace")
        keys = [f"Bearer {key}".encode() for key in (expected, admin_key) if key]
        if not any(hmac.compare_digest(given, key) for key in keys):
            name = "admin_key" if is_admin else "key"
            came = "another key" if given else "no Authorization header"
            raise Unauthorized(
                f"expected the header 'Authorization: Bearer <{name}>', got {came}; send the key "
                "that the server was started with"
            )
