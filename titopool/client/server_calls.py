"""A trainer's calls to the server's HTTP interface, and its own address on the way there.

Runs in: trainers, with the standard library only. Between trainer and server there may be proxies,
and either side may break off: whatever happens, a call gives the server's answer or `WeightsError`.
"""

import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

# Of an answer that is not the server's, in messages.
MAX_SHOWN_BYTES = 200
# Of an answer with an error.
MAX_REFUSAL_BYTES = 64 * 1024
# How long one address of the server may take to accept a connection.
CONNECT_TIMEOUT_S = 5.0
# What urllib raises besides its HTTPError: OSError where there is no connection, or none any more;
# HTTPException for what is no HTTP or is cut off; ValueError for what is no URL.
CALL_ERRORS = (OSError, http.client.HTTPException, ValueError)


class WeightsError(Exception):
    """The server refused a call, or an update failed."""

    def __init__(self, message: str, *, status: int = 0, code: str = ""):
        """`status` and `code` are those of the server's answer, if there was one."""
        super().__init__(message)
        self.status = status
        self.code = code


def post_or_get(
    url: str,
    path: str,
    body: dict[str, Any] | None,
    *,
    api_key: str,
    fields: Mapping[str, type],
    timeout_s: float,
) -> dict[str, Any]:
    """The JSON object that a POST of `body`, or a GET without one, is answered with.

    Args:
        fields: what the answer must have, each with its type.
        timeout_s: that nothing may come for.

    Raises:
        WeightsError: the server refused, cannot be reached, or something else answered.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(path, error) from None
    except CALL_ERRORS as error:
        text = f"{path}: the server does not answer: {type(error).__name__}: {error}"
        raise WeightsError(text) from error
    return _checked(path, answer, fields)


def _checked(path: str, answer: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    try:
        read = json.loads(answer)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict) or not all(
        isinstance(read.get(name), kind) for name, kind in fields.items()
    ):
        expected = f" with {', '.join(fields)}" if fields else ""
        raise WeightsError(
            f"{path}: expected a JSON object{expected} of the server, got {_shown(answer)}; is it "
            "the server that answers at this URL, or a proxy (http_proxy, no_proxy)?"
        )
    return read


def _refusal(path: str, error: urllib.error.HTTPError) -> WeightsError:
    answer = b""
    try:
        answer = error.read(MAX_REFUSAL_BYTES)
        detail = json.loads(answer)["error"]
        message, code = str(detail["message"]), str(detail["code"])
    except Exception:
        # Something between said no, or was cut off.
        text = f"{path}: {error}; the answer was {_shown(answer)}"
        return WeightsError(text, status=error.code)
    return WeightsError(f"{path}: {message}", status=error.code, code=code)


def _shown(answer: bytes) -> str:
    shown = repr(answer[:MAX_SHOWN_BYTES].decode(errors="replace"))
    return shown if len(answer) <= MAX_SHOWN_BYTES else f"{shown}…"


def own_address(url: str) -> str:
    """This machine's address on the way to the server: IPv4, or IPv6 where that is how it is reached.

    Raises:
        WeightsError: there is no way.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{url}: this host name has no address: {error}") from error
    # The address that accepts a connection; behind a proxy none may, and the way there decides.
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
        f"{url}: no way leads from this machine to the server's addresses; say by which address of "
        "this machine the workers reach it (host)"
    )
