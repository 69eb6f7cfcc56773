"""Checks the header `Authorization: Bearer KEY`, as the openai package sends it, or `x-api-key: KEY`, as
the anthropic package does."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from flask import Flask, g, request

from app.http.keys import NO_KEY, Key, Keys
from titopool.errors import SessionNotFound, Unauthorized

# Probes of container platforms send no key. A browser that opens a page sends none either: the page
# holds no data, and the description of the API is the same for every server of a release.
OPEN_ENDPOINTS = {
    "health.health", "health.live", "health.ready", "page.page", "page.asset",
    "description.document", "description.page", "description.asset",
}  # fmt: skip
# The blueprints of all routes that change the model or the workers, or pause generation.
ADMIN_BLUEPRINTS = {"weights", "vllm_rl", "sglang", "workers"}
_SCHEME = b"Bearer "
# A key of this form opens a session's generating routes, for agents that can only be given a key.
SESSION_KEY = b"session:"
# Where a path with a session has left its id.
SESSION_VARIABLE = "titopool.session"
SESSION_ENDPOINTS = {
    "openai.completions", "openai.chat_completions", "anthropic.messages", "anthropic.count_tokens",
    "responses.responses", "models.models",
}  # fmt: skip
NO_SESSION = (
    "expected the id of a session that this server has and that this key made, got another; make one with "
    "POST /sessions"
)
# `/sessions/{id}/v1/…` is a base URL with routes of `/v1/…`, so that agents need no other client.
_SESSION_PATH = re.compile(r"/sessions/([^/]+)(/v1/.*)")
Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]
# The name of the key that made the session with an id, and its weight. Raises a `TitopoolError`.
FindMaker = Callable[[str], tuple[str, int]]


def init_app(
    app: Flask, keys: Keys, find_maker: FindMaker, enter_session: Callable[[str], None]
) -> None:
    """Requires a key on all routes but health and the page itself; an administrator's on administrative routes.

    Without `api_key` and `api_key_file`, no key is required but on administrative routes. Without
    `admin_key` and `api_key_file`, `api_key` opens these. An administrator's key opens all routes. A session
    is open to the key that made it, and to its own.
    """

    @app.before_request
    def check_key() -> None:
        given = request.environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
        sent = request.environ.get("HTTP_X_API_KEY", "").encode("latin-1", "replace")
        if given.startswith(_SCHEME):
            sent = given.removeprefix(_SCHEME)
        endpoint = request.endpoint or ""
        if sent.startswith(SESSION_KEY) and endpoint not in OPEN_ENDPOINTS:
            open_session(sent.removeprefix(SESSION_KEY).decode("latin-1"), endpoint)
            return
        key = keys.find(sent) if sent else None
        g.key = key or NO_KEY
        needs_admin = keys.guard_administration and endpoint.partition(".")[0] in ADMIN_BLUEPRINTS
        g.sees_details = bool(key) or not keys.guard_generation
        g.sees_all = not keys.guard_administration or (key is not None and key.is_admin)
        if endpoint in OPEN_ENDPOINTS or not (needs_admin or keys.guard_generation):
            return
        if key is None or (needs_admin and not key.is_admin):
            name = "admin_key" if needs_admin else "key"
            which = "admin_key, or one marked `admin` in api_key_file" if needs_admin else "its key"
            came = "another key" if given or sent else "no Authorization header"
            raise Unauthorized(
                f"expected the header 'Authorization: Bearer <{name}>', got {came}; ask "
                f"the server's operator for {which}"
            )

    @app.before_request
    def check_session() -> None:
        name = current_session_name()
        if name is not None:
            enter_session(name)

    handle: Wsgi = app.wsgi_app

    def without_session(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Takes a session's id out of the path before the route is found, and so out of logs and spans."""
        if found := _SESSION_PATH.fullmatch(environ["PATH_INFO"]):
            environ[SESSION_VARIABLE], environ["PATH_INFO"] = found.groups()
            environ["RAW_URI"] = environ["REQUEST_URI"] = found[2]
        return handle(environ, start_response)

    app.wsgi_app = without_session  # type: ignore[method-assign]

    def open_session(name: str, endpoint: str) -> None:
        """Lets a session's own key in, as the key of its maker."""
        if endpoint not in SESSION_ENDPOINTS:
            raise Unauthorized(
                "expected a client's key, as the key of a session opens the session's completions, chats, "
                "messages and responses only, got the key of a session; use the key that made it"
            )
        in_path = request.environ.get(SESSION_VARIABLE, name)
        maker, weight = find_maker(name)
        if in_path != name or not keys.has(maker):
            raise SessionNotFound(NO_SESSION)
        g.key, g.sees_details, g.sees_all = Key(maker, is_admin=False, weight=weight), False, False
        g.session_name = name


def current_session_name() -> str | None:
    """The id of the session that the current request is in; None: it is in none."""
    return g.get("session_name") or request.environ.get(SESSION_VARIABLE)


def current_key() -> Key:
    """The current request's key; `NO_KEY` if it has none or an unknown one."""
    key: Key = g.get("key", NO_KEY)
    return key


def sees_all_requests() -> bool:
    """Whether the current request may see ids and addresses of requests with other keys, and abort
    them."""
    return bool(g.get("sees_all", False))


def sees_details() -> bool:
    """Whether the current request may see addresses and processes of the server."""
    return bool(g.get("sees_details", False))
