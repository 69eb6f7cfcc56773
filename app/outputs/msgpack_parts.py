"""MessagePack of many arrays, of which long ones are written from where they are, without a copy."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from app.http.responses import PIECE_BYTES
from app.time_slices import sharing_time

_encode = msgspec.msgpack.Encoder().encode


def msgpack_parts(fields: Mapping[str, Any]) -> list[bytes]:
    """A MessagePack map in parts of at least `PIECE_BYTES`, but for the last and those before an array.

    A list of bytes or None among the values is taken apart, and arrays of `PIECE_BYTES` and more are
    parts as they are. The list is emptied, so that an array is given up when its part is.
    """
    parts, part = list[bytes](), bytearray(_head(len(fields), 0x80, 0xDE))
    for name, value in fields.items():
        part += _encode(name)
        if not _is_list_of_bytes(value):
            part += _encode(value)
            continue
        part += _head(len(value), 0x90, 0xDC)
        value.reverse()
        for _ in sharing_time(range(len(value))):
            array = value.pop()
            if array is None or len(array) < PIECE_BYTES:
                part += _encode(array)
            else:
                # bin 32 of the specification (msgpack.org).
                part += b"\xc6" + len(array).to_bytes(4, "big")
                parts += [bytes(part), array]
                part.clear()
            if len(part) >= PIECE_BYTES:
                parts.append(bytes(part))
                part.clear()
    return [*parts, bytes(part)]


def msgpack_of_list(
    fields: Mapping[str, Any], name: str, items: Iterable[Any], length: int
) -> Iterator[bytes]:
    """A MessagePack map of `fields`, and of `name` with a list whose items are encoded as they are made.

    Arrays of numpy are their bytes.
    """
    yield b"".join(
        [_head(len(fields) + 1, 0x80, 0xDE), *(_encode(one) for field in fields.items() for one in field),
         _encode(name), _head(length, 0x90, 0xDC)]
    )  # fmt: skip
    encode = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes).encode
    yield from map(encode, sharing_time(items))


def _is_list_of_bytes(value: Any) -> bool:
    return isinstance(value, list) and all(one is None or isinstance(one, bytes) for one in value)


def _head(length: int, short: int, long: int) -> bytes:
    """The head of a map or an array: `short` with a length below 16, else 16 or 32 bits after `long`."""
    if length < 16:
        return bytes([short | length])
    is_16_bit = length < 2**16
    return bytes([long if is_16_bit else long + 1]) + length.to_bytes(2 if is_16_bit else 4, "big")
