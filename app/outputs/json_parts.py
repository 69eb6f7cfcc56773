"""JSON of long lists, written item by item: an answer takes little more memory than its arrays."""

from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import orjson

from app.http.responses import PIECE_BYTES
from app.time_slices import sharing_time

# Items of `Rows` that are encoded at once, fewer if that makes more than `PIECE_BYTES`: a row may have an
# object for each entry of the vocabulary.
ROWS_AT_ONCE = 64


class UnknownValue(TypeError):
    """JSON does not have the value."""


class Rows:
    """A list whose items have no lists of unknown length inside; it can be read once."""

    def __init__(self, items: Iterable[Any]):
        self._items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self._items


class Text(ABC):
    """A long text without characters that JSON escapes, made piece by piece."""

    @abstractmethod
    def pieces(self) -> Iterator[bytes]:
        """The text, in ASCII."""


class Base64(Text):
    """Bytes in base64, made of their parts as these are read; it can be read once."""

    def __init__(self, parts: Iterable[bytes]):
        self._parts = parts

    def pieces(self) -> Iterator[bytes]:
        # Base64 takes three bytes at a time.
        left = b""
        for part in self._parts:
            left += part
            end = len(left) - len(left) % 3
            yield b64encode(left[:end])
            left = left[end:]
        yield b64encode(left)


def json_parts(value: Any) -> Iterator[bytes]:
    """JSON of `value` in parts of at least `PIECE_BYTES`, but for the last; other greenlets run meanwhile.

    An iterator, or `Rows`, is a list: its items are encoded as they are made. It may be a value of an
    object in such a list, or in an object in it. Arrays of numpy are lists too. Numbers that are not
    finite are null.
    """
    return sharing_time(_parts(value))


def short_json(value: Any) -> bytes:
    """As `json_parts`, of a value that is known to be short and has no `Text`."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(value, default=_as_list, option=option)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterator) else encode_rows(value)


def _parts(value: Any) -> Iterator[bytes]:
    part = bytearray()
    for token in _tokens(value):
        part += token
        if len(part) >= PIECE_BYTES:
            yield bytes(part)
            part.clear()
    # As all JSON answers have it (`json_line`).
    yield bytes(part + b"\n")


def as_lists(fields: dict[str, Any]) -> dict[str, Any]:
    """A short object with lists for its `Rows`."""
    return {name: list(one) if isinstance(one, Rows) else one for name, one in fields.items()}


def encode_rows(value: Any) -> list[Any]:
    """For orjson, which calls it for `Rows` in a short object."""
    if isinstance(value, Rows):
        return list(value)
    raise UnknownValue(f"expected a value that JSON has, got {type(value).__name__}")


def _tokens(value: Any) -> Iterator[bytes]:
    if isinstance(value, Rows):
        yield b"["
        before, num = b"", 1
        while batch := list(islice(iter(value), num)):
            yield before + (made := _encoded(batch)[1:-1])
            before, num = b",", min(2 * num, ROWS_AT_ONCE, max(1, num * PIECE_BYTES // len(made)))
        yield b"]"
    elif isinstance(value, Text):
        yield b'"'
        yield from value.pieces()
        yield b'"'
    elif isinstance(value, Iterator):
        before = b"["
        for item in value:
            yield before
            yield from _tokens(item)
            before = b","
        yield b"]" if before == b"," else b"[]"
    elif isinstance(value, dict) and not _is_short(value):
        before = b"{"
        for name, field in value.items():
            yield before + orjson.dumps(name) + b":"
            yield from _tokens(field)
            before = b","
        yield b"}"
    else:
        yield _encoded(value)


def _is_short(value: Any) -> bool:
    """Whether no list of unknown length stands in it."""
    if isinstance(value, dict):
        return all(map(_is_short, value.values()))
    return not isinstance(value, Iterator | Rows | Text)


def _encoded(value: Any) -> bytes:
    # orjson writes float32 in the fewest digits that read back as the same float32.
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
