"""The OpenAPI document: complete, valid, true to the routes and in agreement with docs/http.md."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from openapi_spec_validator import validate

from app import create_app
from app.http.auth import ADMIN_BLUEPRINTS, OPEN_ENDPOINTS
from app.route.decoding import Decoder
from app.route.document import SCHEMES, TAGS, Route, methods_of, path_of, routes_of, types_of
from harness.api_schemas import document, operations
from harness.servers import REPOSITORY
from titopool.errors import ERRORS_BY_CODE
from titopool.settings.config import ServerConfig

HOW = "decorate the handler with an Operation (CONTRIBUTING.md, `a route`)"
HTTP_PAGE = (REPOSITORY / "docs" / "http.md").read_text()
JSON = "application/json"


@pytest.fixture(scope="module")
def application() -> Flask:
    return create_app(ServerConfig())


@pytest.fixture(scope="module")
def routes(application: Flask) -> list[Route]:
    return list(routes_of(application))


def test_every_route_has_an_operation(application: Flask):
    served = {
        (method.lower(), path_of(rule))
        for rule in application.url_map.iter_rules()
        for method in methods_of(rule)
    }
    assert {(one.method, one.path) for one in operations()} == served


def test_every_handler_has_an_operation_and_every_blueprint_a_tag(application: Flask):
    without = [
        name
        for name, handler in application.view_functions.items()
        if "operation" not in vars(handler)
    ]
    assert not without, HOW
    blueprints = [name for tag in TAGS.values() for name in tag.blueprints]
    assert len(blueprints) == len(set(blueprints))
    # A blueprint within another one has its tag.
    assert {name.partition(".")[0] for name in application.blueprints} == set(blueprints)


def test_components_have_the_names_of_their_classes():
    """msgspec writes a path with dots where two classes have one name."""
    assert not [name for name in document()["components"]["schemas"] if "." in name]


def test_the_document_is_valid():
    validate(document())


def test_operations_have_names_words_and_known_tags():
    names = [str(one) for one in operations()]
    assert len(set(names)) == len(names)
    for one in operations():
        assert re.fullmatch(r"[a-z]+(_\w+)+", str(one)), one
        assert one.operation["summary"], one
        assert set(one.operation["tags"]) <= TAGS.keys(), one


def test_every_body_has_an_example():
    without = {one.path for one in operations() if one.body and not one.body.get("examples")}
    # Its body has no fields.
    assert without == {"/weights/accept"}


def test_keys_are_those_that_the_server_asks_for(routes: list[Route]):
    for route in routes:
        security = document()["paths"][route.path][route.method.lower()]["security"]
        if route.endpoint in OPEN_ENDPOINTS:
            assert security == [], route
        else:
            is_admin = route.endpoint.partition(".")[0] in ADMIN_BLUEPRINTS
            assert security == [{"adminKey" if is_admin else "key": []}, {}], route
    assert SCHEMES.keys() == {"key", "adminKey"}


def test_a_body_is_described_by_the_decoder_that_its_handler_uses(
    routes: list[Route], application: Flask
):
    """A handler's module, or one that it imports the handling from, has the decoder, if the handler
    has no parameter `body`."""
    for _, _, endpoint, operation in routes:
        handler = inspect.unwrap(application.view_functions[endpoint])
        if "body" in inspect.get_annotations(handler):
            continue
        known = [one for module in modules_of(handler) for one in vars(module).values()]
        for decoder in operation.decoders:
            # /update_weights converts a part of its body.
            types = [*types_of(decoder)[:1], *parts_of(decoder)]
            assert any(one is decoder for one in known) or any(
                one is type_ for one in known for type_ in types[1:]
            ), f"{endpoint}: {decoder}"


def modules_of(handler: Any) -> Iterator[Any]:
    module = sys.modules[handler.__module__]
    yield module
    for value in vars(module).values():
        if inspect.isfunction(value) and value.__module__.startswith("app."):
            yield sys.modules[value.__module__]


def parts_of(decoder: Decoder[Any]) -> list[Any]:
    struct = getattr(decoder, "type", None)
    return list(getattr(struct, "__annotations__", {}).values())


def test_handlers_whose_errors_no_client_repeats_are_marked(
    routes: list[Route], application: Flask
):
    for _, _, endpoint, operation in routes:
        handler = application.view_functions[endpoint]
        is_wrapped = "never_repeated" in handler.__code__.co_qualname
        assert operation.is_never_repeated == is_wrapped, endpoint


def test_every_error_of_the_server_is_in_the_document():
    text = json.dumps(document()["components"]["responses"])
    missing = [code for code in ERRORS_BY_CODE if f'"{code}"' not in text]
    # It stops the start.
    assert missing == ["config_error"]


# ---- docs/http.md --------------------------------------------------------------------------

# A call in the page: perhaps its method, and a path. `GET` may stand alone before another method.
CALL = re.compile(r"`(?:(GET|POST) )?(/[\w/{}.]*)`")
# A part of a path that a client chooses.
PART = re.compile(r"\b[A-Z]+\b")
# Paths of other servers, and beginnings of paths.
NO_ROUTES = {"/v1"}


def calls_of(text: str) -> set[tuple[str, str]]:
    """Paths of the text as the document writes them, with "" for a method that is not named."""
    return {
        (method.lower(), PART.sub(lambda found: f"{{{found[0].lower()}}}", path).rstrip("/") or "/")
        for method, path in CALL.findall(text)
        if path.rstrip("/") not in NO_ROUTES
    }


def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    (found,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", HTTP_PAGE, re.M | re.S)
    return str(found)


def test_the_page_and_the_document_have_the_same_routes():
    served = {(one.method, one.path) for one in operations()}
    paths = {path for _, path in served}
    page = calls_of(HTTP_PAGE)
    assert {path for _, path in page} == paths
    assert {(method, path) for method, path in page if method} <= served
    # Every route that is served is in the table; those that are refused are in the prose.
    is_refused = {one.path for one in operations() if not one.success}
    in_table = {path for _, path in calls_of(section("Routes"))}
    assert paths - in_table <= is_refused


def rows_of(heading: str, first: str) -> list[list[str]]:
    """The cells of the rows of a section's table whose header begins with `first`."""
    (table,) = re.findall(
        rf"^\| {re.escape(first)} \|.*\n\|[-| ]+\|\n((?:\|.*\|\n)+)", section(heading), re.M
    )
    return [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in table.splitlines()]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([a-z]\w*(?:\.\w+)*)`", cell)


def fields_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The properties of all forms of a schema."""
    if "$ref" in schema:
        return fields_of(document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    found = dict(schema.get("properties", {}))
    for one in (*schema.get("anyOf", ()), schema.get("items")):
        found |= fields_of(one) if isinstance(one, dict) else {}
    return found


def fields_of_body(path: str) -> dict[str, dict[str, Any]]:
    return fields_of(document()["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"])


def fields_of_answer(
    path: str, method: str = "post", kind: str = JSON
) -> dict[str, dict[str, Any]]:
    responses = document()["paths"][path][method]["responses"]
    return fields_of(responses["200"]["content"][kind]["schema"])


def has(fields: dict[str, dict[str, Any]], name: str) -> bool:
    """Whether there is a field with a name like `meta_info.id`."""
    first, _, rest = name.partition(".")
    return first in fields and (not rest or has(fields_of(fields[first]), rest))


@pytest.mark.parametrize(
    ("heading", "first", "path"),
    [
        ("`POST /generate/`", "field", "/generate"),
        ("OpenAI's routes", "fields", "/v1/completions"),
        ("OpenAI's routes", "fields", "/v1/chat/completions"),
        ("`POST /inference/v1/generate`", "field", "/inference/v1/generate"),
        ("SGLang's routes", "field", "/generate"),
        ("`POST /get_sequence_logprobs/`", "field", "/get_sequence_logprobs"),
        ("`POST /mismatch`", "field", "/mismatch"),
    ],
)
def test_fields_of_the_page_are_in_bodies(heading: str, first: str, path: str):
    fields = fields_of_body(path)
    # Those of which only null is accepted are no fields of a schema.
    named = [
        name for cell, *others in rows_of(heading, first) if "only null" not in others[-1]
        for name in names_in(cell)
    ]  # fmt: skip
    assert named
    assert [name for name in named if not has(fields, name)] == []


@pytest.mark.parametrize(
    ("schema", "headings"),
    [
        ("GenerateBody", ["`POST /generate/`"]),
        ("ChatBody", ["`POST /chat/`", "`POST /generate/`"]),
        ("SequencesBody", ["`POST /get_sequence_logprobs/`"]),
        ("MismatchBody", ["`POST /mismatch`"]),
        ("GenerateAnswer", ["`POST /generate/`"]),
        ("BinaryGenerateAnswer", ["The binary answer", "`POST /generate/`"]),
        ("SGLangMeta", ["SGLang's routes"]),
        ("TokensChoice", ["`POST /inference/v1/generate`"]),
        ("TokensAnswer", ["`POST /inference/v1/generate`"]),
        ("Render", ["Render and features"]),
        ("MismatchAnswer", ["`POST /mismatch`"]),
    ],
)
def test_fields_of_schemas_are_in_the_page(schema: str, headings: list[str]):
    text = "".join(map(section, headings))
    named = {part for name in names_in(text) for part in (name, name.rpartition(".")[2])}
    fields = fields_of(document()["components"]["schemas"][schema])
    assert sorted(fields.keys() - named) == []


def test_fields_of_one_of_openais_routes_are_in_its_body():
    for cell, names in rows_of("OpenAI's routes", "route"):
        path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[cell]
        assert [name for name in names_in(names) if not has(fields_of_body(path), name)] == []


@pytest.mark.parametrize(
    ("heading", "first", "fields"),
    [
        ("`POST /generate/`", "key", fields_of_answer("/generate")),
        ("The binary answer", "key", fields_of_answer("/generate", kind="application/msgpack")),
        ("`POST /inference/v1/generate`", "key of the answer", fields_of_answer("/inference/v1/generate")),
        ("Render and features", "key of the answer", fields_of_answer("/v1/chat/completions/render")),
        ("SGLang's routes", "key", fields_of_answer("/generate")),
    ],
)  # fmt: skip
def test_keys_of_the_page_are_in_answers(heading: str, first: str, fields: dict[str, Any]):
    named = [name for cell, *_ in rows_of(heading, first) for name in names_in(cell)]
    # Parts of `meta_info` after the first one in a cell stand without it.
    inner = fields_of(fields.get("meta_info", {}))
    assert named
    assert [name for name in named if not has(fields, name) and name not in inner] == []


def test_calls_for_weights_have_the_fields_of_the_page():
    for heading in ("Weight updates", "vLLM's routes for weights"):
        for call, body, answer in rows_of(heading, "call"):
            ((method, path),) = calls_of(call)
            wanted = names_in(body.split("ignored")[0])
            if wanted:
                fields = fields_of_body(path)
                assert [name for name in wanted if not has(fields, name)] == [], path
            if heading == "Weight updates":
                fields = fields_of_answer(path, method)
                deep = fields | fields_of(fields.get("workers", {}))
                assert [name for name in names_in(answer) if not has(deep, name)] == [], path
