"""Every error as JSON in one shape; the routes themselves catch nothing."""

import logging
from typing import Any

import gunicorn.util
import orjson
from flask import Flask, Response, request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from titopool.errors import BodyTooLarge, InvalidRequest, TitopoolError

logger = logging.getLogger(__name__)


def init_app(app: Flask) -> None:
    """Registers the handlers."""
    app.register_error_handler(TitopoolError, _answer)
    app.register_error_handler(RequestEntityTooLarge, _too_large)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(ParseException, _unreadable)
    app.register_error_handler(Exception, _unexpected)
    gunicorn.util.write_error = write_parser_error


def _answer(error: Exception) -> Response:
    assert isinstance(error, TitopoolError)
    response = Response(
        orjson.dumps(error.to_dict()), status=error.status, mimetype="application/json"
    )
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def _too_large(error: Exception) -> Response:
    limit = request.max_content_length
    came = "more" if request.content_length is None else str(request.content_length)
    return _answer(
        BodyTooLarge(
            f"expected a body of at most {limit} bytes (max_body_bytes), got {came}; "
            "send fewer prompts at once"
        )
    )


def _http_error(error: Exception) -> Response:
    """404, 405 and what else Flask raises itself."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.path}: {error.description}"
    body = _refusal(error.name or "error", message)
    return Response(body, status=error.code, mimetype="application/json")


def _refusal(name: str, message: str) -> bytes:
    """The body of an error that HTTP itself has a name for."""
    code = name.lower().replace(" ", "_")
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return orjson.dumps({"error": error})


def _unreadable(error: Exception) -> Response:
    """gunicorn reads chunks when the body is asked for."""
    return _answer(
        InvalidRequest(f"expected a body in the chunks of HTTP/1.1, got others: {error}")
    )


def write_parser_error(client: Any, status: int, reason: str, message: str) -> None:
    """Answers a request whose head gunicorn cannot read; takes the place of gunicorn's HTML.

    Args:
        client: the connection, which gunicorn closes afterwards.
    """
    body = _refusal(reason, f"expected a request of HTTP/1.1, got another: {message}")
    head = (
        f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    gunicorn.util.write_nonblock(client, head.encode("latin-1") + body)


def _unexpected(error: Exception) -> Response:
    logger.exception("%s %s failed", request.method, request.path)
    return _answer(TitopoolError("the front end failed on this request; its log has the reason"))
