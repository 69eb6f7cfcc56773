"""What commands need of a running server: its keys, and its answers to GET."""

import os
import ssl
import urllib.error
import urllib.request
from typing import NamedTuple, TypeVar

import msgspec

from titopool.answers.operators import Ready
from titopool.client.failures import no_server
from titopool.errors import InvalidRequest, TitopoolError
from titopool.settings.config import variable_of

TIMEOUT_S = 10.0
Read = TypeVar("Read", bound=msgspec.Struct)


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
    url: str

    def read(self, kind: type[Read]) -> Read:
        """The body, of the route whose answer is `kind`.

        Raises:
            Unreachable: it is another.
        """
        return read_answer(self.text, kind, self.url)


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
            return Answer(answer.status, answer.read().decode(errors="replace"), url)
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(errors="replace"), url)
    except (OSError, ValueError) as error:
        raise unreachable(url, error) from None


def ready_of(url: str, key: str = "") -> Ready:
    """The answer of `/ready`.

    Raises:
        InvalidRequest: `url` is no URL of HTTP.
        Unreachable: no titopool server answers.
    """
    return get(url, "/ready", key).read(Ready)


def read_answer(text: str, kind: type[Read], url: str) -> Read:
    """The JSON of an answer as a `kind`.

    Raises:
        Unreachable: it is another.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise Unreachable(
            f"{url}: expected a titopool server of this release ({kind.__name__}), got {text[:80]!r} "
            f"({error}); check --url and the server's release"
        ) from None


def unreachable(url: str, error: Exception) -> Unreachable:
    """What urllib's `error` means."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, BaseException) else error
    return Unreachable(no_server(url, cause, "name it with --url"))
