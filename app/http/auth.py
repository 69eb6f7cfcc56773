"""The API key: `Authorization: Bearer KEY`, as the openai package sends it."""

import hmac

from flask import Flask, request

from titopool.errors import Unauthorized

# Probes of a container platform have no key.
OPEN_ENDPOINTS = {"health.health", "health.live", "health.ready"}
# Whose routes change the model, or stop it.
ADMIN_BLUEPRINT = "weights"


def init_app(app: Flask, api_key: str, admin_key: str) -> None:
    """Guards every route but health with `api_key`, administrative ones with `admin_key` instead.

    An empty `api_key` guards nothing; without an `admin_key`, it is the `api_key`. Whoever has the
    `admin_key` may use all routes.
    """

    @app.before_request
    def check_key() -> None:
        endpoint = request.endpoint or ""
        is_admin = bool(admin_key) and endpoint.partition(".")[0] == ADMIN_BLUEPRINT
        expected = admin_key if is_admin else api_key
        if not expected or endpoint in OPEN_ENDPOINTS:
            return
        given = request.headers.get("Authorization", "").encode("latin-1", "replace")
        keys = [f"Bearer {key}".encode() for key in (expected, admin_key) if key]
        if not any(hmac.compare_digest(given, key) for key in keys):
            name = "admin_key" if is_admin else "key"
            came = "another key" if given else "no Authorization header"
            raise Unauthorized(f"expected the header 'Authorization: Bearer <{name}>', got {came}")
