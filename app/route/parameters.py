"""Headers that requests and answers may have, as parts of the document that operations share."""

from typing import Any

from app.http import idempotency, request_ids
from app.http.responses import LOGPROBS_MODE_HEADER
from titopool.release import VERSION_HEADER

REQUEST_ID, SESSION_ID, IDEMPOTENCY_KEY = request_ids.HEADER, "X-Session-ID", idempotency.HEADER


def _text(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string", **schema}}


# Of requests.
HEADERS: dict[str, dict[str, Any]] = {
    REQUEST_ID: _text(
        "Names the request in the answer, the log, and calls that abort it. The server makes an id "
        "if none comes that has 1 to 256 printable ASCII characters without blanks."
    ),
    SESSION_ID: _text(
        "Names a conversation or rollout. Its requests prefer one worker. The first 256 characters "
        "count."
    ),
    IDEMPOTENCY_KEY: _text(
        "A repeat with the same key, body, path and `Accept` gets the answer of the first request, "
        "for 10 minutes. With another body or path, or if the answer had no room "
        "(`idempotency_bytes`), it is a 409. Not with `stream`.",
        minLength=1,
        maxLength=idempotency.MAX_KEY_LENGTH,
    ),
}
# Of answers.
ANSWER_HEADERS: dict[str, dict[str, Any]] = {
    REQUEST_ID: _text("The id of the request."),
    VERSION_HEADER: _text("The server's release."),
    LOGPROBS_MODE_HEADER: _text("What log-probabilities are: vLLM's option `logprobs_mode`."),
    "Retry-After": {
        "description": "Seconds after which a repeat may succeed.",
        "schema": {"type": "integer"},
    },
}


def components() -> dict[str, Any]:
    """The sections `parameters` and `headers` of the document's components."""
    return {
        "parameters": {
            name: {"name": name, "in": "header", **one} for name, one in HEADERS.items()
        },
        "headers": ANSWER_HEADERS,
    }


def header_parameters(names: tuple[str, ...]) -> list[dict[str, str]]:
    """References to request headers; every route takes an id."""
    return [{"$ref": f"#/components/parameters/{name}"} for name in (REQUEST_ID, *names)]


def answer_headers(*names: str) -> dict[str, Any]:
    """References to answer headers; every answer has an id and the release."""
    return {
        name: {"$ref": f"#/components/headers/{name}"}
        for name in (REQUEST_ID, VERSION_HEADER, *names)
    }
