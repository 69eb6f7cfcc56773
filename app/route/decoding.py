"""Turns a body into its struct, and msgspec's errors into refusals that a client understands."""

import difflib
import itertools
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import gevent
import msgspec
from gevent.lock import Semaphore

from app.route.components import Components, Schema
from app.route.long_lists import decode_in_pieces
from app.time_slices import YIELD_S
from titopool.collector import without_collector
from titopool.errors import InvalidRequest

# Matches errors that carry no path: of a missing or unknown field, and of a `__post_init__`.
_NAMED_FIELD = re.compile(
    r"Object (?:missing required|contains unknown) field `(\w{1,64})`$|(\w+): expected "
)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(\w{1,64})`")
decode_object = msgspec.json.Decoder(dict[str, Any]).decode
# Longer bodies are decoded one at a time, and as long as it took belongs to the other greenlets.
LONG_BYTES = 2**18
_long_bodies = Semaphore()
# On the monotonic clock, in seconds.
_next_long_body = 0.0
Body = TypeVar("Body", covariant=True)
Converted = TypeVar("Converted")


class Decoder(Protocol[Body]):
    """msgspec's JSON decoder, or one of a protocol, a `DescribedDecoder`."""

    def decode(self, body: bytes, /) -> Body: ...


@runtime_checkable
class DescribedDecoder(Protocol):
    """What a protocol's decoder has beside `decode`: its body cannot be described by one struct."""

    # The struct whose long lists are decoded in pieces.
    body_type: type[msgspec.Struct]
    # Structs that `schema` asks for.
    types: tuple[Any, ...]

    def schema(self, components: Components) -> Schema:
        """The body's JSON Schema; adds components."""


def decode_body(body: bytes, decoder: Decoder[Body]) -> Body:
    """Decodes a JSON body, strictly.

    Raises:
        InvalidRequest: the body is not JSON, or a field is unknown, missing or of another type;
            the message gives the location, e.g. `prompts[3][17]`.
    """
    try:
        if len(body) <= LONG_BYTES:
            return decoder.decode(body)
        # Each collection would visit all that is decoded so far.
        with _long_bodies, without_collector():
            body_type = getattr(decoder, "body_type", None) or getattr(decoder, "type", None)
            if isinstance(body_type, type) and issubclass(body_type, msgspec.Struct):
                decoded: Body = decode_in_pieces(body, partial(_decode_long, decoder), body_type)
                return decoded
            return _decode_long(decoder, body)
    except msgspec.ValidationError as error:
        raise _refusal(error, getattr(decoder, "type", None)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"expected a JSON body, got something else: {error}") from None


def _decode_long(decoder: Decoder[Body], body: bytes) -> Body:
    global _next_long_body
    gevent.sleep(max(YIELD_S, _next_long_body - time.monotonic()))
    began_s = time.monotonic()
    try:
        return decoder.decode(body)
    finally:
        _next_long_body = 2 * time.monotonic() - began_s


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
        raise _refusal(error, wanted, location) from None


def shown(value: Any) -> str:
    """What came, for an error. A list or an object may be as long as a body, and stands as its type."""
    kinds = {list: "a list", dict: "an object", type(None): "null"}
    text = value[:60] if isinstance(value, str) else value
    return kinds.get(type(value)) or repr(text)[:80]


def beginning(value: Any, length: int, write: Callable[[Any], str] = repr) -> str:
    """The first `length` characters of `write(value)`, whose cost does not grow with `value`."""
    left = length

    def cut(value: Any) -> Any:
        # Each value has a character at least: those after the first `length` are not seen.
        nonlocal left
        left -= 1
        if isinstance(value, str):
            return value[:length]
        if isinstance(value, list):
            return [cut(one) for one in value[: max(0, left)]]
        if isinstance(value, dict):
            names = list(itertools.islice(value, max(0, left)))
            return {name[:length]: cut(value[name]) for name in names}
        return value

    return write(cut(value))[:length]


def _refusal(error: msgspec.ValidationError, wanted: Any, within: str = "") -> InvalidRequest:
    """`error` with its location first, `prompts[3][17]: expected …`, and its top-level field.

    An unknown field of `wanted` gets a similar one that exists.
    """
    text, _, path = str(error).partition(" - at `")
    # msgspec writes the path of an object's key as "`key` in `$.logit_bias`".
    path = path.rpartition("`$")[2].removeprefix("$").rstrip("`")
    location = (within + path).removeprefix(".")
    message = text[:1].lower() + text[1:]
    if not path and (unknown := _UNKNOWN_FIELD.fullmatch(text)):
        known = getattr(wanted, "__struct_fields__", ())
        if close := difflib.get_close_matches(unknown[1], known, n=1):
            message += f"; did you mean `{close[0]}`?"
    if location:
        field = re.split(r"[.\[]", location, maxsplit=1)[0]
        return InvalidRequest(f"{location}: {message}", param=field or None)
    named = _NAMED_FIELD.match(text)
    return InvalidRequest(message, param=(named[1] or named[2]) if named else None)
