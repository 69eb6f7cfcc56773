"""`GET /`: the page, and its scripts and styles. They hold no data and need no key.

Whatever the page shows comes from routes that ask for the key, if the server has one.
"""

from flask import Blueprint, Response, abort, request

from app.operators.page.assets import digest_of, read_assets, version_of
from app.route.operation import Operation

blueprint = Blueprint("page", __name__)

ASSETS = read_assets()
VERSION = version_of(ASSETS)
HTML = ASSETS.pop("index.html").content.replace(b"{version}", VERSION.encode())
# No other host, no inline script or style, no frame around the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
A_YEAR_S = 31_536_000


@blueprint.get("/")
@Operation(summary="The page for a browser.", answer=str, media_type="text/html")
def page() -> Response:
    """The HTML; a browser asks again each time whether it has changed."""
    return _respond(HTML, "text/html", digest_of(HTML), "no-cache")


@blueprint.get("/page/<version>/<path:name>")
@Operation(
    answer=str,
    media_type="text/css",
    other_media={"text/javascript": str, "image/svg+xml": str},
    path_parts={"version": "as the page names it", "name": "a file that the page names"},
)
def asset(version: str, name: str) -> Response:
    """A script, a style or the icon.

    `version` is part of the address, so that browsers keep the file. Another version is that of a
    front end that ran before or will run after this one: its address must not keep this content.
    """
    found = ASSETS.get(name)
    if found is None:
        abort(404)
    is_ours = version == VERSION
    caching = f"public, max-age={A_YEAR_S}, immutable" if is_ours else "no-cache"
    return _respond(found.content, found.mimetype, found.digest, caching)


def _respond(content: bytes, mimetype: str, digest: str, caching: str) -> Response:
    response = Response(content, mimetype=mimetype, headers=HEADERS)
    response.headers["Cache-Control"] = caching
    response.set_etag(digest)
    response.make_conditional(request)
    return response
