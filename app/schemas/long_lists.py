"""Decodes the long lists of a body in pieces, so that other requests run meanwhile.

msgspec decodes without a pause: a MiB of ids takes 4 to 15 ms. To find where the elements of a list
begin takes about a tenth of that.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from app.time_slices import sharing_time

# Shorter lists are decoded with the rest of the body.
LONG_BYTES = 2**16
# Of a list of numbers.
PIECE_BYTES = 2**18
# Lists of ids, and lists of such lists, that become arrays: a list takes ten times their memory.
COMPACT = {"prompts", "sequences", "prompt", "token_ids"}
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements_of = msgspec.json.Decoder(list[msgspec.Raw]).decode
_FIRST = re.compile(rb"\s*\[\s*(.)", re.DOTALL)


def decode_in_pieces(body: bytes, decode: Callable[[bytes], Any], body_type: type) -> Any:
    """As `decode(body)`, with ids of `COMPACT` as int32 [tokens] where they fit.

    Args:
        decode: makes a struct of `body_type` of a body, or a tuple that begins with one.

    Raises:
        msgspec.MsgspecError: as `decode`.
    """
    sent = _fields_of(body)
    types = _element_types(body_type)
    lists = {name: raw for name, raw in sent.items() if name in types and _is_long(raw)}
    if 2 * sum(len(memoryview(raw)) for raw in lists.values()) < len(body):
        return decode(body)
    # The lists are left out of a copy of the body.
    decoded = decode(msgspec.json.encode(sent | {name: [] for name in lists}))
    fields = decoded[0] if isinstance(decoded, tuple) else decoded
    for name, raw in lists.items():
        setattr(fields, name, _decode_list(raw, types[name], name))
    return decoded


@lru_cache
def _element_types(body_type: type) -> dict[str, Any]:
    """The types of the elements of each field that may be a list."""
    types = {}
    for field in msgspec.structs.fields(body_type):
        is_list = get_origin(field.type) is list
        for one in (field.type,) if is_list else get_args(field.type):
            if get_origin(one) is list:
                (types[field.name],) = get_args(one)
    return types


def _is_long(raw: msgspec.Raw) -> bool:
    """Whether `raw` is a long list of something else than text, which is decoded fast."""
    first = _FIRST.match(raw)
    return len(memoryview(raw)) > LONG_BYTES and first is not None and first[1] != b'"'


def _decode_list(raw: msgspec.Raw, wanted: Any, name: str) -> Any:
    first = _FIRST.match(raw)
    if first is not None and first[1] in b"-0123456789":
        ids = _numbers(bytes(raw), wanted, name)
        return _compact(ids) if name in COMPACT else ids
    decoder, decoded = msgspec.json.Decoder(wanted), []
    for index, element in enumerate(sharing_time(_elements_of(raw))):
        try:
            value = decoder.decode(element)
        except msgspec.ValidationError as error:
            text, path = _split(error)
            raise msgspec.ValidationError(f"{text} - at `$.{name}[{index}]{path}`") from None
        decoded.append(_compact(value) if name in COMPACT else value)
    return decoded


def _numbers(text: bytes, wanted: Any, name: str) -> list[Any]:
    decoder = msgspec.json.Decoder(list[wanted])
    numbers: list[Any] = []
    for piece in sharing_time(_pieces(text)):
        try:
            numbers += decoder.decode(b"[" + piece + b"]")
        except msgspec.ValidationError as error:
            reason, path = _split(error)
            index, _, path = path[1:].partition("]")
            place = f"{name}[{len(numbers) + int(index)}]{path}"
            raise msgspec.ValidationError(f"{reason} - at `$.{place}`") from None
        except msgspec.DecodeError:
            # A comma of something else than a list of numbers.
            reason = "Expected a list of integers, got other values"
            raise msgspec.ValidationError(f"{reason} - at `$.{name}`") from None
    return numbers


def _split(error: msgspec.ValidationError) -> tuple[str, str]:
    """What is wrong, and the path to it, such as `[17]`."""
    text, _, path = str(error).partition(" - at `$")
    return text, path.rstrip("`")


def _pieces(text: bytes) -> Iterator[bytes]:
    """The text of a list, without its brackets, cut at commas."""
    begin, last = text.index(b"[") + 1, text.rindex(b"]")
    while begin < last:
        end = text.find(b",", begin + PIECE_BYTES, last)
        end = last if end < 0 else end
        yield text[begin:end]
        begin = end + 1


def _compact(value: Any) -> Any:
    """`value` with its ids as an array; as it is if they do not fit, which the checks refuse."""
    try:
        if isinstance(value, list) and value and isinstance(value[0], int):
            return np.array(value, dtype=np.int32)
        if (ids := getattr(value, "prompt_token_ids", None)) is not None:
            value.prompt_token_ids = np.array(ids, dtype=np.int32)
    except (OverflowError, ValueError):
        pass
    return value
