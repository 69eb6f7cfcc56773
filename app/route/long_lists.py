"""Decodes the long lists of a body in pieces, so that other requests run meanwhile.

msgspec decodes without a pause: a MiB of ids takes 4 to 15 ms. To find where the elements of a list
begin takes about a tenth of that.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgspec
import numpy as np

from app.json_structure import CommasOfList
from app.time_slices import give_way_before, sharing_time

# Shorter lists are decoded with the rest of the body.
LONG_BYTES = 2**16
# Of a list of numbers or texts.
PIECE_BYTES = 2**18
# Texts that are longer on average are decoded with the rest of the body, which is fast.
TEXT_BYTES = 2**15
# Prompts of this length stay lists: an array would take as much.
SHORT_BYTES = 256
# Elements of a list of lists or objects, and commas of an object: more are refused.
MAX_ELEMENTS = 2**18
# Lists of ids, and lists of such lists, that become arrays: a list takes ten times their memory.
COMPACT = {"prompts", "sequences", "prompt", "token_ids", "prompt_token_ids"}
# How deep elements of elements are decoded in pieces; each level reads its text once more.
MAX_DEPTH = 4
MISSING = msgspec.Raw(b"")
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements_of = msgspec.json.Decoder(list[msgspec.Raw]).decode
_FIRST = re.compile(rb"\s*\[\s*(.)", re.DOTALL)
# Elements of a list, with their commas. Few, since a match makes no pause.
_TEXTS = re.compile(rb'(?:\s*+"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*+,){1,16}+')


def decode_in_pieces(
    body: bytes | msgspec.Raw, decode: Callable[[Any], Any], body_type: type
) -> Any:
    """As `decode(body)`, with ids of `COMPACT` as int32 [tokens] where they fit.

    Args:
        decode: makes a struct of `body_type` of a body, or a tuple that begins with one.

    Raises:
        msgspec.MsgspecError: as `decode`.
    """
    try:
        sent = _fields_of_struct(body, body_type)
    except msgspec.ValidationError:
        # `decode` refuses an unknown field at once, or knows another struct.
        return decode(body)
    types = _list_types(body_type)
    for name, raw in sent.items():
        _check_object(name, raw)
    lists = {name: raw for name, raw in sent.items() if name in types and _is_long(raw)}
    if not lists:
        return decode(body)
    # The lists are left out of a copy of the body.
    decoded = decode(msgspec.json.encode(sent | {name: [] for name in lists}))
    fields = decoded[0] if isinstance(decoded, tuple) else decoded
    for name, raw in lists.items():
        setattr(fields, name, _decode_list(raw, types[name], name))
    return decoded


def decode_object_in_pieces(body: bytes | msgspec.Raw, depth: int = 0) -> dict[str, Any]:
    """The fields of an object, of any type.

    Args:
        depth: in how many lists that are decoded in pieces the object stands.

    Raises:
        msgspec.MsgspecError: the body is not a JSON object.
    """
    give_way_before(len(memoryview(body)))
    fields = {}
    for name, raw in sharing_time(_fields_of(body).items()):
        _check_object(name, raw)
        fields[name] = (
            _decode_list(raw, ListType(Any), name, depth)
            if _is_long(raw)
            else msgspec.json.decode(raw)
        )
    return fields


def _fields_of_struct(body: bytes | msgspec.Raw, body_type: type) -> dict[str, msgspec.Raw]:
    """The fields that a body has. Raises msgspec.ValidationError for an unknown one."""
    give_way_before(len(memoryview(body)))
    skimmed = _skimmer(body_type).decode(body)
    return {
        name: raw for name, raw in msgspec.structs.asdict(skimmed).items() if len(memoryview(raw))
    }


@lru_cache
def _skimmer(body_type: type) -> msgspec.json.Decoder[Any]:
    names = [one.name for one in msgspec.structs.fields(body_type)]
    forbids = body_type.__struct_config__.forbid_unknown_fields  # type: ignore[attr-defined]
    fields = [(name, msgspec.Raw, MISSING) for name in names]
    skimmed = msgspec.defstruct("Skimmed", fields, forbid_unknown_fields=forbids, gc=False)
    return msgspec.json.Decoder(skimmed)


def _check_object(name: str, raw: msgspec.Raw) -> None:
    """An object is decoded without a pause. Files have no commas."""
    is_object = bytes(memoryview(raw)[:1]) == b"{" and len(memoryview(raw)) > LONG_BYTES
    if is_object and (num_commas := bytes(raw).count(b",")) > MAX_ELEMENTS:
        raise msgspec.ValidationError(
            f"Expected an object with at most {MAX_ELEMENTS} commas, got {num_commas} - at `$.{name}`"
        )


class ListType(NamedTuple):
    element: Any
    max_length: int = sys.maxsize

    def check(self, length: int) -> None:
        if length > self.max_length:
            raise msgspec.ValidationError(f"Expected `array` of length <= {self.max_length}")


@lru_cache
def _list_types(body_type: type) -> dict[str, ListType]:
    """The types of the fields that may be a list."""
    types = {field.name: _list_type(field.type) for field in msgspec.structs.fields(body_type)}
    return {name: of for name, of in types.items() if of is not None}


def _list_type(of: Any) -> ListType | None:
    """The list that a value of type `of` may be."""
    if of is Any:
        return ListType(Any)
    is_union = get_origin(of) in (Union, UnionType)
    for one in get_args(of) if is_union else (of,):
        of_list, *limits = get_args(one) if get_origin(one) is Annotated else (one,)
        if get_origin(of_list) is list:
            return ListType(*get_args(of_list), *(limit.max_length for limit in limits))
    return None


def _is_long(raw: msgspec.Raw) -> bool:
    """Whether `raw` is a list that takes long to decode."""
    first, num_bytes = _FIRST.match(raw), len(memoryview(raw))
    if num_bytes < LONG_BYTES or first is None:
        return False
    if first[1] != b'"':
        return True
    text = bytes(raw)
    return text.count(b'"') > num_bytes // TEXT_BYTES or text.count(b",") > MAX_ELEMENTS


def _decode_list(raw: msgspec.Raw, of: ListType, name: str, depth: int = 0) -> Any:
    """A list; `name`: of its field, "" for the element of another list."""
    location = f".{name}" if name else ""
    is_compact = name in COMPACT and of.element is not Any
    first = _FIRST.match(raw)
    kind = first[1] if first is not None else b""
    try:
        if kind == b'"':
            pieces = _decode_pieces(_pieces_of_texts(bytes(raw)), of)
            return [one for piece in pieces for one in piece]
        if kind and kind in b"-0123456789":
            return _numbers(raw, of, is_compact=is_compact)
        if kind and kind in b"ntf":
            # Refused at once, or few: null stands for the images of a prompt.
            wanted: Any = list[of.element]  # type: ignore[name-defined]
            return msgspec.json.Decoder(wanted).decode(raw)
        elements = _elements(bytes(raw))
        of.check(len(elements))
    except msgspec.ValidationError as error:
        raise _at(location, error) from None
    decoder, decoded = msgspec.json.Decoder(of.element), list[Any]()
    decode = (
        partial(_decode_prompt, decoder)
        if is_compact
        else partial(_decode_element, decoder, of.element, depth + 1)
    )
    try:
        for element in sharing_time(elements):
            decoded.append(decode(element))
    except msgspec.ValidationError as error:
        raise _at(f"{location}[{len(decoded)}]", error) from None
    return decoded


def _decode_element(
    decoder: msgspec.json.Decoder[Any], of: Any, depth: int, raw: msgspec.Raw
) -> Any:
    """An element of a list; of a long one in pieces: a message of many parts, a conversation."""
    if len(memoryview(raw)) <= PIECE_BYTES or depth > MAX_DEPTH:
        return decoder.decode(raw)
    if bytes(memoryview(raw)[:1]) == b"{" and of in (Any, dict[str, Any]):
        return decode_object_in_pieces(raw, depth)
    if (of_list := _list_type(of)) is not None and _is_long(raw):
        return _decode_list(raw, of_list, "", depth)
    return decoder.decode(raw)


def _decode_prompt(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw) -> Any:
    num_bytes = len(memoryview(raw))
    if num_bytes > PIECE_BYTES:
        return _long_prompt(raw, decoder)
    value = decoder.decode(raw)
    return value if num_bytes < SHORT_BYTES else _compact(value)


def _long_prompt(raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    """A list of ids, or an object that has one."""
    first = _FIRST.match(raw)
    if first is not None and first[1] in b"-0123456789":
        return _numbers(raw, ListType(int), is_compact=True)
    structs = [one for one in get_args(decoder.type) if hasattr(one, "__struct_fields__")]
    if first is None and structs and bytes(memoryview(raw)[:1]) == b"{":
        return decode_in_pieces(raw, msgspec.json.Decoder(structs[0]).decode, structs[0])
    return decoder.decode(raw)


def _numbers(raw: msgspec.Raw, of: ListType, *, is_compact: bool) -> Any:
    """A list of numbers; as int32 [numbers] if `is_compact` and they fit."""
    decoded = _decode_pieces(_pieces_of_numbers(bytes(raw)), of)
    try:
        pieces = [_compact(piece) if is_compact else piece for piece in decoded]
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # A comma of something else than a list of numbers.
        if of.element is Any:
            return msgspec.json.decode(raw)
        raise msgspec.ValidationError("Expected a list of integers, got other values") from None
    if all(isinstance(piece, np.ndarray) for piece in pieces):
        return np.concatenate(pieces)
    return [number for piece in sharing_time(pieces) for number in piece]


def _decode_pieces(pieces: Iterator[bytes], of: ListType) -> Iterator[list[Any]]:
    """The elements of each piece; an error has the place in the whole list."""
    wanted: Any = of.element
    decoder, num_before = msgspec.json.Decoder(list[wanted]), 0
    for text in sharing_time(pieces):
        try:
            piece = decoder.decode(b"[" + text + b"]")
        except msgspec.ValidationError as error:
            reason, path = _split(error)
            index, _, path = path[1:].partition("]")
            place = f"[{num_before + int(index)}]{path}"
            raise msgspec.ValidationError(f"{reason} - at `${place}`") from None
        num_before += len(piece)
        of.check(num_before)
        yield piece


def _at(location: str, error: msgspec.ValidationError) -> msgspec.ValidationError:
    """`error` with `location` before its path."""
    reason, path = _split(error)
    return msgspec.ValidationError(f"{reason} - at `${location}{path}`")


def _split(error: msgspec.ValidationError) -> tuple[str, str]:
    """What is wrong, and the path to it, such as `[17]`."""
    text, _, path = str(error).partition(" - at `$")
    return text, path.rstrip("`")


def _pieces_of_numbers(text: bytes) -> Iterator[bytes]:
    """The text of a list, without its brackets, cut at commas."""
    begin, last = text.index(b"[") + 1, text.rindex(b"]")
    while begin < last:
        end = text.find(b",", begin + PIECE_BYTES, last)
        end = last if end < 0 else end
        yield text[begin:end]
        begin = end + 1


def _pieces_of_texts(text: bytes) -> Iterator[bytes]:
    """The same of a list that begins with texts; from something else on, element by element."""
    begin = end = text.index(b"[") + 1
    while texts := _TEXTS.match(text, end):
        end = texts.end()
        if end - begin > PIECE_BYTES:
            yield text[begin : end - 1]
            begin = end
    if begin < end:
        yield text[begin : end - 1]
    yield from map(bytes, _elements(b"[" + text[end:]))


def _elements(text: bytes) -> list[msgspec.Raw]:
    """The elements of a list; refuses a long list before it is taken apart, which makes no pause."""
    if text.count(b",") > MAX_ELEMENTS:
        commas = CommasOfList()
        for begin in sharing_time(range(0, len(text), LONG_BYTES)):
            commas.add(text[begin : begin + LONG_BYTES])
        if commas.count >= MAX_ELEMENTS:
            raise msgspec.ValidationError(f"Expected `array` of length <= {MAX_ELEMENTS}")
    give_way_before(len(text))
    return _elements_of(text)


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
