"""MessagePack in parts is what msgspec writes, and has long arrays as they are."""

import msgspec
import pytest

from app.http.responses import PIECE_BYTES
from app.outputs.msgpack_parts import msgpack_parts

ARRAYS = {
    "none": [],
    "short": [b"", b"a" * 255, b"b" * 256, None],
    "many": [b"ab"] * 70_000,
    "fifteen": [b""] * 15,
    "sixteen": [b""] * 16,
    "long": [b"c" * PIECE_BYTES, b"d", b"e" * (PIECE_BYTES - 1), b"f" * (3 * PIECE_BYTES)],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_bytes_are_msgspecs(name: str):
    fields = {
        "before": [1, "x", {"y": None}],
        name: ARRAYS[name],
        "same": ARRAYS[name],
        "after": None,
    }
    given = fields | {name: ARRAYS[name][:], "same": ARRAYS[name][:]}
    assert b"".join(msgpack_parts(given)) == msgspec.msgpack.encode(fields)
    assert given[name] == given["same"] == []


def test_a_map_of_many_fields_and_of_none():
    many = {f"field {index}": [b"x"] for index in range(20)}
    assert b"".join(msgpack_parts({key: [b"x"] for key in many})) == msgspec.msgpack.encode(many)
    assert b"".join(msgpack_parts({})) == msgspec.msgpack.encode({})


def test_long_arrays_are_not_copied_and_other_parts_are_no_shorter_than_a_write():
    long = b"a" * (2 * PIECE_BYTES)
    parts = msgpack_parts({"arrays": [long, *[b"b" * 1000] * 1000, long], "end": None})
    assert sum(part is long for part in parts) == 2
    short = [part for part in parts if len(part) < PIECE_BYTES]
    # Before each long array, and at the end.
    assert len(short) <= 3
