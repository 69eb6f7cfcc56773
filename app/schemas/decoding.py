"""Turns a body into its struct, and msgspec's errors into refusals that a client understands."""

import re
from typing import Any, Protocol, TypeVar

import msgspec

from titopool.errors import InvalidRequest

# Matches errors that carry no path: of a missing or unknown field, and of a `__post_init__`.
_NAMED_FIELD = re.compile(
    r"Object (?:missing required|contains unknown) field `(\w{1,64})`$|(\w+): expected "
)
Body = TypeVar("Body", covariant=True)
Converted = TypeVar("Converted")


class Decoder(Protocol[Body]):
    """msgspec's JSON decoder, or `app.schemas.openai.OpenAIDecoder`."""

    def decode(self, body: bytes, /) -> Body: ...


def decode_body(body: bytes, decoder: Decoder[Body]) -> Body:
    """Decodes a JSON body, strictly.

    Raises:
        InvalidRequest: the body is not JSON, or a field is unknown, missing or of another type;
            the message gives the location, e.g. `prompts[3][17]`.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"expected a JSON body, got something else: {error}") from None


def convert(value: Any, wanted: type[Converted], location: str = "") -> Converted:
    """Converts decoded JSON to `wanted`.

    Args:
        location: where `value` stands in the body; "" for the body itself.

    Raises:
        InvalidRequest: `value` is not a valid `wanted`.
    """
    try:
        # JSON object keys are strings; the keys of `logit_bias` are token ids.
        return msgspec.convert(value, wanted, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(error, location) from None


def _refusal(error: msgspec.ValidationError, within: str = "") -> InvalidRequest:
    """`error` with its location first, `prompts[3][17]: expected …`, and its top-level field."""
    text, _, path = str(error).partition(" - at `")
    # msgspec writes the path of an object's key as "`key` in `$.logit_bias`".
    path = path.rpartition("`$")[2].removeprefix("$").rstrip("`")
    location = (within + path).removeprefix(".")
    message = text[:1].lower() + text[1:]
    if location:
        field = re.split(r"[.\[]", location, maxsplit=1)[0]
        return InvalidRequest(f"{location}: {message}", param=field or None)
    named = _NAMED_FIELD.match(text)
    return InvalidRequest(message, param=(named[1] or named[2]) if named else None)
