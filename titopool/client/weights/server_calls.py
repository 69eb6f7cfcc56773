"""A trainer's HTTP calls to the server, and the address from which it reaches the server.

Runs in: trainers. Imports the standard library and the words of the other client's errors. A proxy may answer, and either side may close
the connection: a call always returns the server's response or raises `WeightsError`.
"""

import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from titopool.client.failures import no_server

# How much of a response that is not the server's is shown in an error message.
MAX_SHOWN_BYTES = 200
# How much of an error response is read.
MAX_ERROR_BYTES = 64 * 1024
# For each address of the server.
CONNECT_TIMEOUT_S = 5.0
# What urllib raises besides HTTPError. OSError: no connection, or a lost one. HTTPException: the
# response is not HTTP, or is cut off. ValueError: not a URL.
CALL_ERRORS = (OSError, http.client.HTTPException, ValueError)


class WeightsError(Exception):
    """The server refused a call, or an update failed."""

    def __init__(self, message: str, *, status: int = 0, code: str = ""):
        """`status` (0) and `code` ("") are the server's, if it sent a response.

        A call that could not be sent has status 0 and the code `invalid_request`.
        """
        super().__init__(message)
        self.status = status
        self.code = code


class NoResponse(WeightsError):
    """The server cannot be reached, or the connection was lost."""


def post_or_get(
    url: str,
    path: str,
    body: dict[str, Any] | None,
    *,
    api_key: str,
    fields: Mapping[str, type],
    timeout_s: float,
) -> dict[str, Any]:
    """The JSON object in the response to a POST of `body`, or to a GET if there is no body.

    Args:
        fields: required fields of the response, with their types.
        timeout_s: time without progress on the connection.

    Raises:
        WeightsError: the server refused or cannot be reached, or the response is not the server's.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path}: expected arguments that JSON has, got others: {error}", code="invalid_request"
        ) from error
    try:
        request = urllib.request.Request(url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal_of(path, error) from None
    except CALL_ERRORS as error:
        if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
            text = no_server(url, error.reason, "check the URL")
            raise NoResponse(f"{path}: {text}") from error
        text = f"{path}: no response from the server: {type(error).__name__}: {error}"
        raise NoResponse(text) from error
    return _decoded(path, content, fields)


def _decoded(path: str, content: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    try:
        response = json.loads(content)
    except (ValueError, RecursionError):
        response = None
    if not isinstance(response, dict) or not all(
        isinstance(response.get(name), kind) for name, kind in fields.items()
    ):
        expected = f" with {', '.join(fields)}" if fields else ""
        raise WeightsError(
            f"{path}: expected a JSON object{expected} from the server, got {_shown(content)}; check "
            "that the server answers at this URL, and not a proxy (http_proxy, no_proxy)"
        )
    return response


def _refusal_of(path: str, error: urllib.error.HTTPError) -> WeightsError:
    content = b""
    try:
        content = error.read(MAX_ERROR_BYTES)
        detail = json.loads(content)["error"]
        message, code = str(detail["message"]), str(detail["code"])
    except Exception:
        # The response is a proxy's, or is cut off.
        text = f"{path}: {error}; the response was {_shown(content)}"
        return WeightsError(text, status=error.code)
    return WeightsError(f"{path}: {message}", status=error.code, code=code)


def _shown(content: bytes) -> str:
    shown = repr(content[:MAX_SHOWN_BYTES].decode(errors="replace"))
    return shown if len(content) <= MAX_SHOWN_BYTES else f"{shown}…"


def own_address(url: str) -> str:
    """The address, IPv4 or IPv6, from which this machine reaches the server at `url`.

    Raises:
        WeightsError: the host name cannot be resolved, or no address of the server can be reached.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{url}: the host name cannot be resolved: {error}") from error
    # The first address that accepts a TCP connection. Behind a proxy none may accept; then the
    # first address with a route (connecting UDP sends nothing).
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        for family, _, _, _, address in found:
            try:
                with socket.socket(family, kind) as probe:
                    probe.settimeout(CONNECT_TIMEOUT_S)
                    probe.connect(address)
                    return str(probe.getsockname()[0])
            except OSError:
                continue
    raise WeightsError(
        f"{url}: this machine has no route to the server's addresses; pass `host`, the address at "
        "which the workers reach this machine"
    )
