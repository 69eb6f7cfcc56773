"""JSON of long lists, written item by item: an answer takes little more memory than its bytes."""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from app.http.responses import PIECE_BYTES


def json_parts(fields: Mapping[str, Any]) -> list[bytes]:
    """A JSON object in parts of at least `PIECE_BYTES`, but for the last.

    An iterator among the values is a list: each of its items is encoded before the next one is
    made. Arrays of numpy are lists too. Numbers that are not finite are null.
    """
    parts, part = list[bytes](), bytearray()
    before = b"{"
    for name, value in fields.items():
        part += before + orjson.dumps(name) + b":"
        before = b","
        if not isinstance(value, Iterator):
            part += _encoded(value)
            continue
        part += b"["
        is_first = True
        for item in value:
            part += b"" if is_first else b","
            part += _encoded(item)
            is_first = False
            if len(part) >= PIECE_BYTES:
                parts.append(bytes(part))
                part.clear()
        part += b"]"
    # As all JSON answers have it (`json_line`).
    part += b"}\n" if fields else b"{}\n"
    return [*parts, bytes(part)]


def _encoded(value: Any) -> bytes:
    # orjson writes float32 in the fewest digits that read back as the same float32.
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
