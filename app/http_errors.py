"""Every error as JSON in one shape; the routes themselves catch nothing."""

import logging

import orjson
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from titopool.errors import BodyTooLarge, TitopoolError

logger = logging.getLogger(__name__)


def init_app(app: Flask) -> None:
    """Registers the handlers."""
    app.register_error_handler(TitopoolError, _answer)
    app.register_error_handler(RequestEntityTooLarge, _too_large)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unexpected)


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
    name = (error.name or "error").lower().replace(" ", "_")
    message = f"{request.method} {request.path}: {error.description}"
    body = {"message": message, "type": "invalid_request_error", "code": name, "param": None}
    return Response(orjson.dumps({"error": body}), status=error.code, mimetype="application/json")


def _unexpected(error: Exception) -> Response:
    logger.exception("%s %s failed", request.method, request.path)
    return _answer(TitopoolError("the front end failed on this request; its log has the reason"))
