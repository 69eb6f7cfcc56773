"""The session that a request is in: by its path, or by its key.

`/sessions/{id}/v1/…` is a base URL with routes of `/v1/…`, so that agents need no other client.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from flask import Flask, current_app, g, request

from app.conversations.store import Session, SessionStore
from app.http.auth import (
    NO_SESSION,
    SESSION_ENDPOINTS,
    SESSION_VARIABLE,
    current_key,
    current_session_name,
)
from titopool.errors import SessionNotFound

_PATH = re.compile(r"/sessions/([^/]+)(/v1/.*)")
Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]


def init_app(app: Flask) -> None:
    """Takes a session's id out of the path before the route is found, and so out of logs and spans.

    A request in a session that there is not ends before its handler.
    """
    handle: Wsgi = app.wsgi_app

    def without_session(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if found := _PATH.fullmatch(environ["PATH_INFO"]):
            environ[SESSION_VARIABLE], environ["PATH_INFO"] = found.groups()
            environ["RAW_URI"] = environ["REQUEST_URI"] = found[2]
        return handle(environ, start_response)

    app.wsgi_app = without_session  # type: ignore[method-assign]

    @app.before_request
    def find_session() -> None:
        name = current_session_name()
        if name is None:
            return
        if (request.endpoint or "") not in SESSION_ENDPOINTS:
            raise SessionNotFound(
                "expected chat/completions, completions, messages, messages/count_tokens, responses or models "
                f"after /sessions/{{id}}/v1/, got {request.path[:100]}; use one of these"
            )
        g.session = session_of(name), name


def current_session() -> tuple[Session, str] | None:
    """The session of the current request and its id; None: it is in none."""
    found: tuple[Session, str] | None = g.get("session")
    return found


def session_of(name: str) -> Session:
    """The session with an id.

    Raises:
        SessionNotFound: there is none, or another key has made it.
        SessionEnded, TitopoolError: as `SessionStore.find`.
    """
    found = _known(name)
    if found.maker.name != current_key().name:
        raise SessionNotFound(NO_SESSION)
    return found


def find_maker(name: str) -> tuple[str, int]:
    """The name of the key that made a session, and its weight.

    Raises:
        TitopoolError: as `SessionStore.find`.
    """
    maker = _known(name).maker
    return maker.name, maker.weight


def _known(name: str) -> Session:
    """Looked up once for a request."""
    if g.get("known_session", ("", None))[0] != name:
        store: SessionStore = current_app.extensions["titopool"].sessions
        g.known_session = name, store.find(name)
    found: Session = g.known_session[1]
    return found
