"""`GET /openapi.json`, and `GET /docs`, which shows it with Swagger UI.

The document is the same for every server of a release: it has no model, address or key. So both
need no key: a browser that opens a page sends none. Calls that the page makes need the route's key.
"""

import functools
import hashlib
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from flask import Blueprint, Response, abort, current_app, request, url_for

from app.http.responses import respond_in_parts
from app.route.document import encoded
from app.route.operation import Operation

blueprint = Blueprint("description", __name__)

# Of the application: the document as JSON.
EXTENSION = "titopool.openapi"
# Unmodified files of Swagger UI, from the package flask-swagger-ui.
PACKAGE, FOLDER = "flask_swagger_ui", "dist"
MEDIA = {"css": "text/css", "js": "text/javascript", "png": "image/png"}
UI_FILES = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png")
# Starts Swagger UI: inline scripts are forbidden.
START = "start.js"
START_SCRIPT = """\
SwaggerUIBundle({
  url: document.currentScript.dataset.document,
  dom_id: "#page",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  filter: true,
  // A validator would be another host.
  validatorUrl: null,
});
"""
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>titopool API</title>
<link rel="icon" type="image/png" href="{icon}">
<link rel="stylesheet" href="{style}">
</head>
<body>
<noscript>This page needs JavaScript. The document is <a href="{document}">openapi.json</a>.</noscript>
<div id="page"></div>
<script src="{library}"></script>
<script src="{start}" data-document="{document}"></script>
</body>
</html>
"""
# No other host, no inline script, no frame around the page. Swagger UI writes style attributes.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@blueprint.get("/openapi.json")
@Operation(summary="This document.", answer=dict[str, Any])
def document() -> Response:
    """The routes of this server as an OpenAPI 3.1 document."""
    known = current_app.extensions
    if EXTENSION not in known:
        known[EXTENSION] = encoded(current_app)
    return _cached(known[EXTENSION], "application/json")


@blueprint.get("/docs/")
@Operation(summary="A page that shows this document.", answer=str, media_type="text/html")
def page() -> Response:
    """The document, for people."""
    style, library, icon = (url_for(".asset", name=name) for name in UI_FILES)
    html = PAGE.format(
        style=style, library=library, icon=icon,
        start=url_for(".asset", name=START), document=url_for(".document"),
    )  # fmt: skip
    response = _cached(html.encode(), "text/html")
    response.headers["Content-Security-Policy"] = POLICY
    return response


@blueprint.get("/docs/<name>")
@Operation(
    summary="A file of that page.",
    answer=str,
    media_type="text/css",
    other_media={"text/javascript": str, "image/png": str},
    path_parts={"name": "a file that the page names"},
)
def asset(name: str) -> Response:
    """A file of the page."""
    if name not in (*UI_FILES, START):
        abort(HTTPStatus.NOT_FOUND)
    media = MEDIA[name.rpartition(".")[2]]
    return _cached(START_SCRIPT.encode() if name == START else _ui_file(name), media)


@functools.cache
def _ui_file(name: str) -> bytes:
    return files(PACKAGE).joinpath(FOLDER, name).read_bytes()


def _cached(body: bytes, mimetype: str) -> Response:
    """A response that a client may keep, but asks for again: a 304 if nothing has changed."""
    response = respond_in_parts([body], mimetype)
    response.set_etag(hashlib.sha256(body).hexdigest()[:32])
    response.headers |= {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    response.make_conditional(request)
    return response
