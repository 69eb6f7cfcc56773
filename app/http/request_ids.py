"""The header X-Request-Id: taken or made, repeated in the response, and logged with a failure.

`POST /abort_requests` and the log find a request by it.
"""

import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

from flask import Flask, Response, g, request

from app.http.auth import OPEN_ENDPOINTS, current_key
from titopool.errors import TitopoolError
from titopool.settings.logs import current_request

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
# Printable ASCII without blanks, so that an id fits a header and a line of a log.
_USABLE = re.compile(r"[!-~]{1,256}")
MAX_LOGGED = 1000
# What a message expected. What follows, and what stands in quotes, may be what the client sent.
_EXPECTED = re.compile(r"[^`'\"]*?\bexpected [^'\"]*?(?=, got|['\"]|$)")


def init_app(app: Flask) -> None:
    """Gives every request an id. An id that is not usable is replaced."""

    @app.before_request
    def take() -> None:
        given = request.environ.get("HTTP_X_REQUEST_ID", "")
        g.has_request_id = is_usable(given)
        _name(given if g.has_request_id else new_id())

    @app.after_request
    def repeat(response: Response) -> Response:
        response.headers[HEADER] = g.request_id
        # A probe would log the same every few seconds.
        if response.status_code >= 400 and request.endpoint not in OPEN_ENDPOINTS:
            body = response.get_json(silent=True)
            error = body.get("error") if isinstance(body, dict) else None
            # An internal error has been logged with its traceback.
            if isinstance(error, dict) and error.get("code") != TitopoolError.code:
                log_failure(g.request_id, response.status_code, error, current_key().name)
        return response


def new_id() -> str:
    """An id for a request that brings none."""
    return uuid.uuid4().hex


def _name(name: str) -> None:
    g.request_id = name
    # For all lines that this greenlet logs.
    current_request.set(name)


def is_usable(given: str) -> bool:
    """Whether `given` may be a request's id."""
    return _USABLE.fullmatch(given) is not None


def request_id() -> str:
    """The id of the current request."""
    name: str = g.request_id
    return name


def adopt(given: str | None) -> str:
    """Uses the id of a body, unless a header has brought one; returns the current request's id."""
    if given and not g.has_request_id and is_usable(given):
        _name(given)
    return request_id()


def make_unique() -> str:
    """Adds to the current request's id what makes it no other one's; returns it."""
    _name(f"{request_id()}-{new_id()[:12]}")
    return request_id()


def log_failure(name: str, status: int, error: Mapping[str, Any], key: str) -> None:
    """Logs why request `name` failed: at level warning if the client is not the cause.

    No log but that of level debug repeats parts of a body, which may be of a prompt.

    Args:
        error: the object `error` of the answer.
        key: the name of the client's key; "": none.
    """
    level = logging.WARNING if status >= 500 else logging.INFO
    message = error["message"]
    if status == 400 and not logger.isEnabledFor(logging.DEBUG):
        found = _EXPECTED.match(message)
        message = found[0] if found else "log_level debug shows the message"
    logger.log(
        level, "request %s failed with %d %s%s: %s",
        name, status, error["code"], f" (key {key})" if key else "", message[:MAX_LOGGED],
    )  # fmt: skip
