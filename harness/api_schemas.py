"""The OpenAPI document of this checkout, and real answers compared with it."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import requests
from jsonschema_rs import Draft202012Validator

from app import create_app
from app.route.document import document_of
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
    return [
        f"{error.instance_path}: {error.message[:500]}"
        for error in _validator(msgspec.json.encode(schema)).iter_errors(value)
    ]


@functools.cache
def _validator(schema: bytes) -> Draft202012Validator:
    """Made once for each schema, which takes longer than most comparisons."""
    components = closed_document()["components"]
    return Draft202012Validator({**json.loads(schema), "components": components})


def check_answer(described: Described, answer: requests.Response) -> None:
    """The answer's status, media type, headers and body are those of the document."""
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
        found = problems(value, schema.get("x-event", schema))
        assert not found, f"{found}; {shown}"


def check_json_answer(answer: requests.Response) -> None:
    """`check_answer` for JSON of any path of the document; what else a test gets passes."""
    method = str(answer.request.method).lower()
    path = answer.request.path_url.partition("?")[0].rstrip("/") or "/"
    template = next((one for pattern, one in _patterns() if pattern.fullmatch(path)), "")
    is_json = answer.headers.get("Content-Type", "").startswith(JSON)
    if is_json and method in document()["paths"].get(template, {}):
        check_answer(operation_of(method, template), answer)


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Each path of the document, those without variable parts first."""
    paths = sorted(document()["paths"], key=lambda path: path.count("{"))
    return [(re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))), path) for path in paths]


# Where they apply: a repeat helps, a model has been asked.
OPTIONAL_HEADERS = {"Retry-After"}


def _values(kind: str, answer: requests.Response) -> Iterator[Any]:
    if kind == JSON:
        yield answer.json()
    elif kind == MSGPACK:
        yield _without_bytes(msgspec.msgpack.decode(answer.content))
    elif kind == EVENTS:
        *events, end = answer.text.split("\n\n")
        if not events[0].startswith("event: "):
            assert events.pop() == "data: [DONE]", answer.text
        assert events, answer.text
        assert not end, answer.text
        for one in events:
            name, _, data = one.rpartition("data: ")
            value = json.loads(data)
            assert not name or name == f"event: {value['type']}\n", one
            yield value
    else:
        yield answer.text


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {key: _without_bytes(one) for key, one in value.items()}
    return [_without_bytes(one) for one in value] if isinstance(value, list) else value
