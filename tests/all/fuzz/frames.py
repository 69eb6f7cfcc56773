"""Frames for the sockets: messages of `titopool/wire/messages.py`, mutated ones, and other bytes.

A message is made as plain data from its msgspec type, so that it may also hold values that no
struct accepts. The `repr` of `Parts` can be pasted into an `@example`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from tests.all.fuzz.values import Strategy

encode = msgspec.msgpack.Encoder().encode
INTEGERS = (0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, -1.0, 0.5, 1e308, float("nan"), float("inf"), float("-inf"))
# Bytes of arrays: whole numbers of items of 4 and 8 bytes, and other lengths.
BYTES = (b"", b"\0" * 4, b"\1\0\0\0\2\0\0\0", b"\xff" * 8, b"\0", b"\0" * 7, b"\xff" * 43)
TEXTS = ("", "a", "\0", "é", "x" * 40)
# Inserted as encoded bytes: invalid MessagePack, or a value of the wrong type.
RAW = tuple(map(msgspec.Raw, (
    b"\xc1", b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xd9\x05ab", b"\xdd\x7f\xff\xff\xff", b"\xdf\x7f\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff", b"\xc7\x01\x05a", b"\xd6\xff\0\0\0\0", b"\x91" * 2000 + b"\x01", b"\x81\xa1a" * 2000 + b"\x01",
    b"\xca\x7f\xc0\x00\x00", b"\x80\x80", b"",
)))  # fmt: skip
Hints = Mapping[str, Strategy]


def message_of(struct: type[msgspec.Struct], hints: Hints) -> Strategy:
    """A message of the type `struct`; fields named in `hints` mostly take the hint's values."""
    return _values(inspect.type_info(struct), hints)


def _values(kind: inspect.Type, hints: Hints) -> Strategy:
    match kind:
        case inspect.StructType():
            return _struct(kind, hints)
        case inspect.UnionType(types=types):
            return st.one_of([_values(one, hints) for one in types])
        case inspect.ListType(item_type=item):
            return st.lists(_values(item, hints), max_size=2)
        case inspect.TupleType(item_types=items):
            return st.tuples(*[_values(one, hints) for one in items]).map(list)
        case inspect.DictType(value_type=value):
            return st.dictionaries(st.sampled_from(TEXTS), _values(value, hints), max_size=2)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.RawType() | inspect.AnyType():
            return st.sampled_from((None, 1, "a", [], {}, {"a": [1]}))
    leaves: dict[type, tuple[Any, ...]] = {
        inspect.NoneType: (None,), inspect.BoolType: (True, False), inspect.IntType: INTEGERS,
        inspect.FloatType: FLOATS, inspect.StrType: TEXTS, inspect.BytesType: BYTES,
    }  # fmt: skip
    return st.sampled_from(leaves[type(kind)])


def _struct(kind: inspect.StructType, hints: Hints) -> Strategy:
    fields, optional = {}, {}
    for field in kind.fields:
        typed, hint = _values(field.type, hints), hints.get(field.encode_name)
        values = typed if hint is None else st.one_of(*[hint] * 6, typed)
        is_needed = field.required or hint is not None or kind.array_like
        (fields if is_needed else optional)[field.encode_name] = values
    if kind.array_like:
        return st.tuples(*fields.values()).map(list)
    head = {} if kind.tag is None else {kind.tag_field: st.just(kind.tag)}
    return st.fixed_dictionaries({**head, **fields}, optional=optional)


_wrong = st.one_of(
    st.sampled_from(INTEGERS), st.sampled_from(FLOATS), st.sampled_from(TEXTS),
    st.sampled_from(BYTES), st.sampled_from(RAW), st.sampled_from((None, True, [], {}, [[]])),
)  # fmt: skip


@st.composite
def mutated(draw: Callable[[Strategy], Any], value: Any) -> Any:
    """The message with one error somewhere inside."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        name = draw(st.sampled_from(list(value)))
        mutation = draw(st.sampled_from(("inside", "inside", "inside", "less", "more")))
        if mutation == "inside":
            return {**value, name: draw(mutated(value[name]))}
        if mutation == "less":
            return {key: one for key, one in value.items() if key != name}
        return {**value, "more": draw(_wrong)}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        position = draw(st.integers(0, len(value) - 1))
        mutation = draw(st.sampled_from(("inside", "inside", "less", "more")))
        if mutation == "inside":
            return [*value[:position], draw(mutated(value[position])), *value[position + 1 :]]
        return value[:position] + (
            value[position:] * 2 if mutation == "more" else value[position + 1 :]
        )
    return draw(_wrong)


class Parts(NamedTuple):
    """The frames of one ZeroMQ message."""

    frames: tuple[bytes, ...]


@st.composite
def parts_of(draw: Callable[[Strategy], Any], message: Strategy) -> Parts:
    """A message in one frame, valid or mutated or truncated, or in several frames."""
    value = draw(message)
    for _ in range(draw(st.sampled_from((0, 1, 1, 2)))):
        value = draw(mutated(value))
    frame = encode(value)
    mutation = draw(st.integers(0, 19))
    if mutation == 0:
        frame = frame[: draw(st.integers(0, len(frame)))]
    elif mutation == 1:
        position = draw(st.integers(0, len(frame)))
        frame = frame[:position] + draw(st.binary(max_size=4)) + frame[position + 1 :]
    elif mutation == 2:
        return Parts((frame, *draw(st.lists(st.binary(max_size=4), min_size=1, max_size=3))))
    elif mutation == 3:
        return Parts((draw(st.binary(max_size=30)),))
    return Parts((frame,))
