"""Makes the document: the application's routes, with what their handlers say (`Operation`)."""

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from flask import Flask
from werkzeug.routing import Rule

from app.http.auth import ADMIN_BLUEPRINTS, OPEN_ENDPOINTS, SESSION_ENDPOINTS
from app.http.responses import LOGPROBS_MODE_HEADER, json_line
from app.route import parameters
from app.route.components import Components, Schema
from app.route.decoding import Decoder, DescribedDecoder
from app.route.error_schemas import Error, error_responses, errors_of
from app.route.operation import EVENTS, JSON, Operation
from titopool.errors import SessionEnded, SessionNotFound
from titopool.release import RELEASE

ABOUT = """\
Token ids in, token ids out: a generation server for reinforcement-learning post-training.

Every path works with and without a trailing slash. Unknown fields are refused by name, except where
a schema allows them. Answers may get further fields in later releases. A request that is no HTTP/1.1
gets a 400, 405, 414, 417, 431 or 501 in the shape of all errors. `docs/http.md` is the reference in
prose.
"""


class Tag(NamedTuple):
    """A family of routes."""

    description: str
    blueprints: tuple[str, ...]


# In the order in which the page shows them.
TAGS = {
    "generate": Tag(
        "Token ids in, token ids out, as TRL's client calls it; scores and tokenization.",
        ("generate", "chat", "sequence_logprobs", "tokenize", "mismatch"),
    ),
    "openai": Tag("OpenAI's routes with vLLM's extensions.", ("openai", "models", "responses")),
    "anthropic": Tag("Anthropic's Messages.", ("anthropic",)),
    "inference": Tag(
        "vLLM's native routes for token ids, and render, which makes their bodies.",
        ("inference", "render"),
    ),
    "sessions": Tag("Sessions of agents, and what a trainer reads of them.", ("sessions",)),
    "sglang": Tag(
        "SGLang's native routes. Its `/generate` is the one of the first family.", ("sglang",)
    ),
    "weights": Tag(
        "Updates of weights, pauses and adapters. They need an administrator's key.", ("weights",)
    ),
    "vllm_rl": Tag(
        "vLLM's routes for weights and caches. They need an administrator's key.",
        ("vllm_rl", "server_info"),
    ),
    "admin": Tag(
        "Probes, metrics and workers.",
        ("health", "metrics", "history", "requests", "overview", "page", "workers", "description"),
    ),
}
TAG_OF = {blueprint: name for name, tag in TAGS.items() for blueprint in tag.blueprints}
# Werkzeug answers these itself.
OWN_METHODS = {"HEAD", "OPTIONS"}
# Werkzeug's variable part of a path: `<name>`, or `<converter(…):name>`.
_PART = re.compile(r"<(?:[^<>]+:)?(\w+)>")
# The schemes of `app.http.auth`.
KEY, ADMIN_KEY = "key", "adminKey"
SCHEMES = {
    KEY: "`api_key`, or one of `api_key_file`. Not needed if the server has none.",
    ADMIN_KEY: "`admin_key`, or one marked `admin` in `api_key_file`. Where there is neither, "
    "`api_key`, if there is one.",
}


class Route(NamedTuple):
    """A method of a path, and what the handler says of it."""

    method: str
    path: str
    endpoint: str
    operation: Operation

    @property
    def tag(self) -> str:
        return TAG_OF[self.endpoint.partition(".")[0]]

    @property
    def operation_id(self) -> str:
        """The method and the path's words: unique, and a name in every language."""
        return "_".join([self.method.lower(), *(re.findall(r"\w+", self.path) or ["root"])])

    @property
    def is_open(self) -> bool:
        """Whether the route never asks for a key."""
        return self.endpoint in OPEN_ENDPOINTS

    @property
    def is_admin(self) -> bool:
        """Whether the route asks for an administrator's key, if there is one."""
        return self.endpoint.partition(".")[0] in ADMIN_BLUEPRINTS


def encoded(app: Flask) -> bytes:
    """The document of an application as JSON."""
    return json_line(document_of(app))


def document_of(app: Flask) -> dict[str, Any]:
    """The OpenAPI 3.1 document of an application's routes."""
    order = {name: index for index, name in enumerate(TAGS)}
    routes = sorted(routes_of(app), key=lambda route: order[route.tag])
    components = Components(_types_of(routes))
    responses: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        handler = app.view_functions[route.endpoint]
        described = _described(route, inspect.getdoc(handler) or "", components, responses)
        paths.setdefault(route.path, {})[route.method.lower()] = described
    parts = {"responses": dict(sorted(responses.items())), **parameters.components()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "titopool", "version": RELEASE, "description": ABOUT},
        "tags": [{"name": name, "description": tag.description} for name, tag in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": components.used_by({"paths": paths, **parts}),
            **parts,
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": text}
                for name, text in SCHEMES.items()
            },
        },
    }


def routes_of(app: Flask) -> Iterator[Route]:
    """Every method of every path.

    Raises:
        KeyError: a handler has no `Operation`.
    """
    for rule in app.url_map.iter_rules():
        operation = vars(app.view_functions[rule.endpoint])["operation"]
        for method in sorted(methods_of(rule)):
            yield Route(method, path_of(rule), rule.endpoint, operation)


def methods_of(rule: Rule) -> set[str]:
    """The methods that a handler serves."""
    return set(rule.methods or ()) - OWN_METHODS


def path_of(rule: Rule) -> str:
    """The path as OpenAPI writes it, without its trailing slash."""
    return _PART.sub(r"{\1}", rule.rule).rstrip("/") or "/"


def _types_of(routes: list[Route]) -> Iterator[Any]:
    yield Error
    for _, _, _, operation in routes:
        for decoder in operation.decoders:
            yield from types_of(decoder)
        answers = (
            operation.answer, operation.failure, operation.error, *operation.other_answers.values(),
            *operation.other_media.values(),
        )  # fmt: skip
        yield from (one for one in answers if one is not None)


def types_of(decoder: Decoder[Any]) -> tuple[Any, ...]:
    """The structs that the schema of a body is made of."""
    if isinstance(decoder, DescribedDecoder):
        return decoder.types
    assert isinstance(decoder, msgspec.json.Decoder)
    return (decoder.type,)


def body_schema(decoder: Decoder[Any], components: Components) -> Schema:
    """The schema of a body; adds components."""
    if isinstance(decoder, DescribedDecoder):
        return decoder.schema(components)
    return components.ref(*types_of(decoder))


def _described(
    route: Route, docstring: str, components: Components, responses: dict[str, Any]
) -> dict[str, Any]:
    """The Operation Object of a route; adds shared responses."""
    operation = route.operation
    summary, _, details = docstring.partition("\n")
    # Sections of a docstring are for callers in Python.
    details = re.split(r"\n\s*(?:Args|Raises|Returns):", details)[0].strip()
    security: list[dict[str, list[str]]] = []
    if not route.is_open:
        security = [{ADMIN_KEY if route.is_admin else KEY: []}, {}]
    described = {
        "operationId": route.operation_id,
        "tags": [route.tag],
        "summary": (operation.summary or summary).rstrip("."),
        "description": "\n\n".join(filter(None, (details, operation.description))),
        "security": security,
        "parameters": list(_parameters(route)),
        "responses": _responses(route, components, responses),
    }
    if operation.decoders:
        described["requestBody"] = _request_body(operation, components)
    return described


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        yield {
            "name": name, "in": "path", "required": True, "schema": {"type": "string"},
            "description": route.operation.path_parts.get(name, ""),
        }  # fmt: skip
    for name, schema, description in route.operation.query:
        yield {"name": name, "in": "query", "schema": schema, "description": description}
    yield from parameters.header_parameters(route.operation.headers)


def _request_body(operation: Operation, components: Components) -> dict[str, Any]:
    schemas = [body_schema(one, components) for one in operation.decoders]
    content: dict[str, Any] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    if operation.examples:
        content["examples"] = {
            name: {"summary": one.summary, "value": one.body}
            for name, one in operation.examples.items()
        }
    return {"required": not operation.is_body_optional, "content": {JSON: content}}


def _responses(
    route: Route, components: Components, shared: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    operation = route.operation
    found = errors_of(operation, takes_body=route.method == "POST", is_open=route.is_open)
    if route.endpoint in SESSION_ENDPOINTS:
        found |= {SessionNotFound, SessionEnded}
    shapes: dict[Any, Schema] = {Error: components.ref(Error)}
    for own in (operation.failure, operation.error):
        if own is not None:
            shapes[own] = components.ref(own)
    answers: dict[str, dict[str, Any]] = {}
    for status, (name, response) in error_responses(found, operation, shapes).items():
        shared[name] = response
        answers[str(status)] = {"$ref": f"#/components/responses/{name}"}
    if not operation.is_refused:
        answers[str(operation.status)] = _answer(operation, components)
    for status, type_ in operation.other_answers.items():
        content = {JSON: {"schema": components.ref(type_)}}
        answers[str(status)] = {
            "description": "The same answer, where the pool is not ready.",
            "headers": parameters.answer_headers(),
            "content": content,
        }
    return dict(sorted(answers.items()))


def _answer(operation: Operation, components: Components) -> dict[str, Any]:
    headers = (LOGPROBS_MODE_HEADER,) if operation.headers else ()
    answer: dict[str, Any] = {
        "description": "The answer.",
        "headers": parameters.answer_headers(*headers),
    }
    if operation.answer is not None:
        media = {operation.media_type: operation.answer, **operation.other_media}
        answer["content"] = {
            kind: {
                "schema": _events(components.ref(one)) if kind == EVENTS else components.ref(one)
            }
            for kind, one in media.items()
        }
    return answer


def _events(schema: Schema) -> Schema:
    about = (
        "Server-sent events: `data` is the object of an event, an error, or at the end `[DONE]`."
    )
    # Without a type: tools differ in what they take a stream for.
    return {"description": about, "x-event": schema}
