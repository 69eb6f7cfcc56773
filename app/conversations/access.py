"""The session that a request is in: by its path, or by its key (`app.http.auth`)."""

from flask import current_app, g, request

from app.conversations.store import Session, SessionStore
from app.http.auth import (
    NO_SESSION,
    SESSION_ENDPOINTS,
    current_key,
)
from titopool.errors import SessionNotFound


def enter_session(name: str) -> None:
    """Lets the current request into a session.

    Raises:
        SessionNotFound: its route is not one of a session's, or as `session_of`.
        TitopoolError: as `session_of`.
    """
    if (request.endpoint or "") not in SESSION_ENDPOINTS:
        raise SessionNotFound(
            "expected chat/completions, completions, messages, messages/count_tokens, responses or models "
            f"after /sessions/{{id}}/v1/, got {request.path[:100]}; use one of these"
        )
    g.session = session_of(name), name


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
