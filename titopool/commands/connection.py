"""What commands need of a running server: its keys, and its answers to GET."""

import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from titopool.client.failures import no_server
from titopool.errors import InvalidRequest, TitopoolError
from titopool.settings.config import variable_of

TIMEOUT_S = 10.0


class Keys(NamedTuple):
    """As the server reads them; other users can see command lines."""

    api_key: str
    admin_key: str


def keys() -> Keys:
    """The keys in the environment."""
    api_key = os.environ.get(variable_of("api_key"), "")
    return Keys(api_key, os.environ.get(variable_of("admin_key"), "") or api_key)


class Unreachable(TitopoolError):
    """No server answers at the address, or what answers is none of titopool's."""

    status = 503
    code = "unreachable"


class Answer(NamedTuple):
    """Status and body of an answer."""

    status: int
    text: str

    def json(self) -> Any:
        """The body.

        Raises:
            Unreachable: it is no JSON.
        """
        try:
            return json.loads(self.text)
        except ValueError:
            raise Unreachable(
                f"expected JSON of a titopool server, got {self.text[:80]!r}; check --url"
            ) from None


def get(url: str, path: str, key: str = "") -> Answer:
    """The answer to a GET, also one with an error's status.

    Raises:
        InvalidRequest: `url` is no URL of HTTP.
        Unreachable: there is no answer within `TIMEOUT_S`.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url: expected http://host:port or https://host:port, got {url!r}")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
    context = ssl.create_default_context() if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            return Answer(answer.status, answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(errors="replace"))
    except (OSError, ValueError) as error:
        raise unreachable(url, error) from None


def ready_of(url: str, key: str = "") -> dict[str, Any]:
    """The answer of `/ready`.

    Raises:
        InvalidRequest: `url` is no URL of HTTP.
        Unreachable: no titopool server answers.
    """
    body = get(url, "/ready", key).json()
    if not isinstance(body, dict) or "workers" not in body:
        raise Unreachable(f"{url}: expected a titopool server, got {str(body)[:80]}; check --url")
    return body


def unreachable(url: str, error: Exception) -> Unreachable:
    """What urllib's `error` means."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, BaseException) else error
    return Unreachable(no_server(url, cause, "name it with --url"))
