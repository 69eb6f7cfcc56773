"""The OpenAPI document of this checkout, and real answers compared with it."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema_rs
import msgspec
import requests
from jsonschema import Draft202012Validator

from app import create_app
from app.openapi.document import document_of
from titopool.settings.config import ServerConfig

JSON, MSGPACK, EVENTS = "application/json", "application/msgpack", "text/event-stream"
METHODS = ("get", "post", "put", "delete", "patch")


class Described(NamedTuple):
    """An operation of the document."""

    method: str
    path: str
    operation: dict[str, Any]

    def __str__(self) -> str:
        return str(self.operation["operationId"])

    @property
    def body(self) -> dict[str, Any]:
        """The schema and the examples of its body; {}: it has none."""
        found: dict[str, Any] = (
            self.operation.get("requestBody", {}).get("content", {}).get(JSON, {})
        )
        return found

    @property
    def success(self) -> int:
        """The status of its answer; 0: it has none."""
        return next((int(one) for one in self.operation["responses"] if one.startswith("2")), 0)


@functools.cache
def document() -> dict[str, Any]:
    """The document as a client gets it."""
    made: dict[str, Any] = json.loads(json.dumps(document_of(create_app(ServerConfig()))))
    return made


@functools.cache
def closed_document() -> dict[str, Any]:
    """The document with schemas that allow no further fields: a new field of an answer is seen."""
    made: dict[str, Any] = json.loads(json.dumps(document()))
    for schema in made["components"]["schemas"].values():
        _close(schema)
    return made


def _close(schema: Any) -> None:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            schema.setdefault("additionalProperties", False)
        for one in schema.values():
            _close(one)
    elif isinstance(schema, list):
        for one in schema:
            _close(one)


def operations() -> list[Described]:
    """All operations of the document."""
    return [
        Described(method, path, operation)
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
        if method in METHODS
    ]


def operation_of(method: str, path: str) -> Described:
    return Described(method, path, document()["paths"][path][method])


def problems(value: Any, schema: dict[str, Any]) -> list[str]:
    """What of `value` does not fit a schema of the closed document."""
    whole = {**schema, "components": closed_document()["components"]}
    return [
        f"{error.json_path}: {error.message[:500]}"
        for error in Draft202012Validator(whole).iter_errors(value)
    ]


def check_answer(described: Described, answer: requests.Response) -> None:
    """The answer's status, media type and body are those of the document."""
    shown = f"{described}: {answer.status_code} {answer.text[:500]}"
    responses = described.operation["responses"]
    assert str(answer.status_code) in responses, shown
    response = responses[str(answer.status_code)]
    if "$ref" in response:
        response = document()["components"]["responses"][response["$ref"].rpartition("/")[2]]
    for name in response["headers"]:
        assert name in answer.headers or name in OPTIONAL_HEADERS, f"{name}: {shown}"
    if "content" not in response:
        assert not answer.content, shown
        return
    kind = answer.headers["Content-Type"].partition(";")[0]
    assert kind in response["content"], shown
    schema = response["content"][kind]["schema"]
    for value in _values(kind, answer):
        assert not problems(value, schema.get("x-event", schema)), shown


def check_json_answer(answer: requests.Response) -> None:
    """The status and the fields of a JSON answer are those of the document.

    Unlike `check_answer` it finds the operation by the path, and takes microseconds: each answer
    that a test gets passes through it. Other paths and other media pass.
    """
    method = str(answer.request.method).lower()
    path = answer.request.path_url.partition("?")[0].rstrip("/") or "/"
    kind = answer.headers.get("Content-Type", "").partition(";")[0]
    described = next((one for pattern, one in _patterns() if pattern.fullmatch(path)), "")
    if kind != JSON or method not in document()["paths"].get(described, {}):
        return
    shown = f"{method} {described}: {answer.status_code} {answer.text[:500]}"
    found = _validator(method, described, str(answer.status_code))
    assert found is not None, f"the document has no such status; {shown}"
    for error in found.iter_errors(answer.json()):
        raise AssertionError(f"{error.instance_path}: {error.message[:500]}; {shown}")


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Each path of the document, those without variable parts first."""
    paths = sorted(document()["paths"], key=lambda path: path.count("{"))
    return [(re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))), path) for path in paths]


@functools.cache
def _validator(method: str, path: str, status: str) -> jsonschema_rs.Draft202012Validator | None:
    """Of the JSON answers of an operation; None: the document has none of this status."""
    responses = closed_document()["paths"][path][method]["responses"]
    response = responses.get(status)
    if response and "$ref" in response:
        response = closed_document()["components"]["responses"][response["$ref"].rpartition("/")[2]]
    schema = (response or {}).get("content", {}).get(JSON, {}).get("schema")
    if schema is None:
        return None
    return jsonschema_rs.Draft202012Validator(
        {**schema, "components": closed_document()["components"]}
    )


# Where they apply: a repeat helps, a model has been asked.
OPTIONAL_HEADERS = {"Retry-After"}


def _values(kind: str, answer: requests.Response) -> Iterator[Any]:
    if kind == JSON:
        yield answer.json()
    elif kind == MSGPACK:
        yield _without_bytes(msgspec.msgpack.decode(answer.content))
    elif kind == EVENTS:
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", ""), answer.text
        assert events, answer.text
        yield from (json.loads(one.removeprefix("data: ")) for one in events)
    else:
        yield answer.text


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {key: _without_bytes(one) for key, one in value.items()}
    return [_without_bytes(one) for one in value] if isinstance(value, list) else value
