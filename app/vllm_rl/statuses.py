"""Statuses of errors that do a stock trainer no harm.

TRL's client sends a request again after 429, 500, 502 and 503. A repeated call for weights would
begin a second receive while the trainer's first broadcast still waits. So such errors become 409,
with the same code and message, and every answer is JSON.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from flask import Response, request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import HTTPException

from app.http.errors import REPEATED
from app.http.request_ids import request_id
from app.http.responses import json_response
from titopool.errors import TitopoolError

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]


def never_repeated(handler: Handler) -> Handler:
    """Answers with 409 where the handler's error has a status after which a client calls again.

    It stands above the handler's `Operation`, whose errors it changes, those of decoding too.
    """

    @functools.wraps(handler)
    def call() -> Response:
        try:
            answer: Response = handler()
            return answer
        except TitopoolError as error:
            if error.status not in REPEATED:
                raise
            found = error
        except (HTTPException, ParseException):
            # A body that is too large or cannot be read.
            raise
        except Exception:
            logger.exception("%s %s failed, request %s", request.method, request.path, request_id())
            found = TitopoolError("the front end failed on this request; its log has the reason")
        return json_response(found.to_dict(request_id()), HTTPStatus.CONFLICT)

    if operation := vars(handler).get("operation"):
        vars(call)["operation"] = replace(operation, is_never_repeated=True)
    return call
