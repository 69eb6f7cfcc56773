"""Turns every error into a JSON response of one shape, so that routes catch nothing.

Shape: `{"error": {"message", "type", "code", "param", "request_id"}}`; but for the id, which is that of
the header X-Request-Id, as OpenAI's API has it.
"""

import logging
import re
from collections import Counter
from functools import partial
from typing import Any

import gunicorn.util
from flask import Flask, Response, g, request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from app.counts.http_requests import code_in_body
from app.http.request_ids import HEADER, new_id
from app.http.responses import json_line, json_response
from titopool.errors import BodyTooLarge, InvalidRequest, TitopoolError
from titopool.release import RELEASE, VERSION_HEADER

logger = logging.getLogger(__name__)

# Statuses after which TRL's client (1.16) or urllib3 sends the request again.
REPEATED = frozenset((429, 500, 502, 503))
_SESSION = re.compile(r"^/sessions/[^/]+")


def init_app(app: Flask, refused: Counter[str] | None = None) -> None:
    """Registers the error handlers, also with gunicorn's parser.

    Args:
        refused: counts requests that are answered with an error, by its code. All codes are the
            server's own, so there are few.
    """
    counts = Counter[str]() if refused is None else refused

    @app.after_request
    def count(response: Response) -> Response:
        # Of the answer, as some routes answer errors by themselves.
        if response.status_code >= 400 and (code := code_in_body(response)):
            counts[code] += 1
        return response

    app.register_error_handler(TitopoolError, _error_response)
    app.register_error_handler(RequestEntityTooLarge, _too_large)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(ParseException, _unreadable_body)
    app.register_error_handler(RecursionError, _too_deep)
    app.register_error_handler(Exception, _unexpected)
    gunicorn.util.write_error = partial(write_parser_error, counts)


def _error_response(error: Exception) -> Response:
    assert isinstance(error, TitopoolError)
    # For the request's span.
    g.error_code = error.code
    response = json_response(error.to_dict(g.get("request_id", "")), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def _too_large(error: Exception) -> Response:
    limit = request.max_content_length
    came = "more" if request.content_length is None else str(request.content_length)
    return _error_response(
        BodyTooLarge(
            f"expected a body of at most {limit} bytes (max_body_bytes), got {came}; "
            "send fewer prompts in one request"
        )
    )


def _http_error(error: Exception) -> Response:
    """Werkzeug's own errors, such as 404 and 405."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {_path()}: {error.description}"
    name = g.get("request_id", "")
    return json_response(_http_error_body(error.name or "error", message, name), error.code or 500)


def _path() -> str:
    """The path, without the id of a session, which opens it."""
    return _SESSION.sub("/sessions/{id}", request.path)


def _http_error_body(name: str, message: str, request_id: str) -> dict[str, Any]:
    """The body of an error whose code is the name of its HTTP status."""
    code = _code_of(name)
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return {"error": error | {"request_id": request_id}}


def _code_of(name: str) -> str:
    return name.lower().replace(" ", "_")


def _unreadable_body(error: Exception) -> Response:
    # gunicorn parses a chunked body only when the handler reads it.
    return _error_response(
        InvalidRequest(f"expected a body in HTTP/1.1's chunked encoding, got another: {error}")
    )


def _too_deep(error: Exception) -> Response:
    # The handlers' own calls are few: only what a client nested can be this deep. Where that begins
    # depends on the calls that a field passes.
    return _error_response(
        InvalidRequest("expected JSON with fewer levels, got more than this server can read")
    )


def write_parser_error(
    counts: Counter[str], client: Any, status: int, reason: str, message: str
) -> None:
    """Answers a request whose head gunicorn cannot parse; replaces gunicorn's HTML page.

    Args:
        counts: of errors, by their codes.
        client: the connection, which gunicorn closes afterwards.
    """
    text = f"expected an HTTP/1.1 request, got another: {message}"
    name = new_id()
    counts[_code_of(reason)] += 1
    logger.info("request %s could not be parsed: %d %s", name, status, reason)
    body = json_line(_http_error_body(reason, text, name))
    head = (
        f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"{VERSION_HEADER}: {RELEASE}\r\n{HEADER}: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    gunicorn.util.write_nonblock(client, head.encode("latin-1") + body)


def _unexpected(error: Exception) -> Response:
    logger.exception("%s %s failed, request %s", request.method, _path(), g.get("request_id"))
    return _error_response(
        TitopoolError("the front end failed on this request; its log has the reason")
    )
