"""The error responses of an operation, made from the classes in `titopool/errors.py`.

Responses are shared: operations with the same errors at a status refer to one component.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from app.http.errors import REPEATED
from app.route.components import Schema
from app.route.operation import BODY_ERRORS, JSON, Operation
from app.route.parameters import answer_headers
from titopool.errors import ForeignPage, InvalidRequest, QueueFull, TitopoolError, Unauthorized

# gunicorn's or Werkzeug's own refusals, which have no class: by status the code and its meaning.
UNNAMED = {
    400: ("bad_request", "This is no request of HTTP/1.1, or its body ended early."),
    404: ("not_found", "There is no such route."),
}


# Whose answers say when to come back.
RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What was expected, what came and what to do."""

    message: str
    # OpenAI's.
    type: str
    # Stable: clients branch on it.
    code: str
    # The field of the body that is wrong.
    param: str | None
    # That of the header; errors of a process that has no request lack it.
    request_id: str | UnsetType = UNSET


class Error(msgspec.Struct, kw_only=True):
    """Every error, in OpenAI's shape."""

    error: ErrorDetail


def errors_of(operation: Operation, *, takes_body: bool, is_open: bool) -> set[type[TitopoolError]]:
    """All errors that an operation can give, apart from those without a class."""
    found: set[type[TitopoolError]] = {
        InvalidRequest,
        ForeignPage,
        TitopoolError,
        *operation.errors,
    }
    if takes_body:
        found.update(BODY_ERRORS)
    if not is_open:
        found.add(Unauthorized)
    return found


def error_responses(
    found: Iterable[type[TitopoolError]], operation: Operation, shapes: dict[Any, Schema]
) -> dict[int, tuple[str, dict[str, Any]]]:
    """By status: the name of a shared response, and the response.

    Args:
        shapes: the schemas of `Error` and of the operation's own types.
    """
    by_status: defaultdict[int, list[type[TitopoolError]]] = defaultdict(list)
    for error in sorted(found, key=lambda one: one.code):
        for status in _statuses_of(error, operation):
            by_status[status].append(error)
    if operation.path_parts:
        # Of a path that is none of this route.
        by_status[HTTPStatus.NOT_FOUND] = by_status[HTTPStatus.NOT_FOUND]
    answers = {}
    for status, errors in sorted(by_status.items()):
        is_own = operation.failure is not None and status == HTTPStatus.BAD_REQUEST
        shape = operation.failure if is_own else operation.error or Error
        name = "-".join([shape.__name__, str(status), *(one.code for one in errors)])
        answers[status] = (name, _response(status, errors, shapes[shape]))
    return answers


def _statuses_of(error: type[TitopoolError], operation: Operation) -> set[int]:
    # Refused before the handler runs.
    if error in (Unauthorized, ForeignPage):
        return {error.status}
    if not operation.is_never_repeated or error.status not in REPEATED:
        is_own = operation.failure is not None and error is not TitopoolError
        return {HTTPStatus.BAD_REQUEST if is_own else error.status}
    # A fault outside of the handler has its own status, and so has a body that has no room.
    is_outside = error in (TitopoolError, QueueFull)
    return {HTTPStatus.CONFLICT, error.status} if is_outside else {HTTPStatus.CONFLICT}


def _response(status: int, errors: Sequence[type[TitopoolError]], shape: Schema) -> dict[str, Any]:
    meanings = {one.code: _meaning(one) for one in errors}
    if status in UNNAMED:
        code, meaning = UNNAMED[status]
        meanings[code] = meaning
    # What stands beside `$ref` holds too: the codes of this response.
    codes = {"properties": {"error": {"properties": {"code": {"enum": sorted(meanings)}}}}}
    headers = ("Retry-After",) if status in RETRIED else ()
    return {
        "description": "\n".join(f"- `{code}`: {text}" for code, text in meanings.items()),
        "headers": answer_headers(*headers),
        "content": {JSON: {"schema": {**shape, **codes}}},
    }


def _meaning(error: type[TitopoolError]) -> str:
    if error is TitopoolError:
        return "A fault of the front end; its log has the reason."
    return (inspect.getdoc(error) or "").partition("\n")[0]
