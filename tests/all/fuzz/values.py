"""JSON from msgspec types: values that a schema accepts, and mutated ones.

Values are Python values and two classes of this module for what Python cannot represent: `Raw` is
literal JSON text, `Pairs` an object whose names may repeat.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st
from msgspec import inspect

Strategy = st.SearchStrategy[Any]
# By field name: values that are likely to be accepted, and cheap.
Hints = Mapping[str, Strategy]


class Raw(str):
    """JSON text, valid or not."""


class Pairs(NamedTuple):
    """An object as ordered pairs; names may repeat."""

    items: tuple[tuple[str, Any], ...]


def dump(value: Any) -> bytes:
    """The JSON text of a value; lone surrogates become escapes."""
    return _text(value).encode()


def _text(value: Any) -> str:
    match value:
        case Raw():
            return str(value)
        case Pairs(items=items):
            return _object(items)
        case dict():
            return _object(value.items())
        case list():
            return "[" + ",".join(map(_text, value)) + "]"
        case _:
            return json.dumps(value)


def _object(items: Any) -> str:
    return "{" + ",".join(f"{json.dumps(str(key))}:{_text(one)}" for key, one in items) + "}"


# ---- leaves ----------------------------------------------------------------------------

INTEGERS = (0, 1, -1, 2, 3, 7, 16, 31, 63, 127, 128, 2047, 2048, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63))  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, 1e-9, 1e-300, 5e-324, -1.5, 1e9, 1.7e308)
# Control characters, multi-byte characters, characters that split or join others.
TEXTS = ("", " ", "a", "\0", "\n", "é", "日本", "\u202e", "\ufffd", "𝄞", "e\u0301", "<|im_end|>", "<|endoftext|>", "{", "(", "\\", '"')  # fmt: skip
texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12), st.just("long " * 400))
# JSON or nearly JSON that no Python value produces.
ODD = tuple(map(Raw, (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1E-400", "1" + "0" * 30, "-" + "9" * 40,
    "1.0", "1e0", "-0", "01", "+1", ".5", "0x10", "1_0", "tru", "undefined", "'a'", "",
    '"\\ud800"', '"\\udc00\\ud800"', '"a\\u0000b"', '"\\x41"', '"\\ud834\\udd1e"', '"\t"',
    "[1,]", "{,}", '{"a":1,}', '{"a":1,"a":2}', "[[[]]]", "/*a*/1",
)))  # fmt: skip
wrong = st.one_of(
    st.sampled_from((None, True, False, 0, 1, -1, 0.5, "", "a", "1", [], {}, [None], [1], [[1]], {"a": 1})),
    st.sampled_from(INTEGERS), st.sampled_from(FLOATS), st.sampled_from(TEXTS),
    st.sampled_from(ODD),
)  # fmt: skip
small_json: Strategy = st.recursive(
    st.one_of(st.none(), st.booleans(), st.sampled_from(INTEGERS), st.sampled_from(FLOATS), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)
# Depths near limits of titopool, CPython and the C stack.
depths = st.sampled_from((2, 10, 63, 64, 65, 66, 100, 500, 900, 960, 965, 970, 990, 999, 1000, 1010, 1024, 3000))  # fmt: skip


def nested(depth: int, *, in_objects: bool) -> Raw:
    """A value nested to `depth` levels."""
    return Raw('{"a":' * depth + "1" + "}" * depth if in_objects else "[" * depth + "]" * depth)


# ---- what a type takes -----------------------------------------------------------------


def values_of(kind: inspect.Type, hints: Hints) -> Strategy:
    """Values that msgspec accepts for a type, limits included."""
    match kind:
        case inspect.Metadata(type=described):
            return values_of(described, hints)
        case inspect.StructType():
            return objects_of(kind, hints)
        case inspect.UnionType(types=types):
            return st.one_of([values_of(one, hints) for one in types])
        case inspect.ListType(item_type=item, min_length=least, max_length=most):
            least = least or 0
            return st.lists(
                values_of(item, hints), min_size=least, max_size=min(most or 99, least + 3)
            )
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_keys(key), values_of(value, hints), max_size=3)
        case _:
            return _leaf(kind)


def _keys(kind: inspect.Type) -> Strategy:
    if isinstance(kind, inspect.IntType):
        return st.sampled_from(INTEGERS).map(str)
    return st.sampled_from(TEXTS)


def _leaf(kind: inspect.Type) -> Strategy:
    match kind:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return _numbers(kind, INTEGERS, step=1)
        case inspect.FloatType():
            return _numbers(kind, FLOATS, step=1e-6)
        case inspect.StrType(min_length=least, max_length=most):
            candidates = [one for one in (*TEXTS, "long " * 400) if (least or 0) <= len(one)]
            return st.sampled_from([one[: most or None] for one in candidates])
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.AnyType():
            return small_json
    raise NotImplementedError(f"values of {kind}")


def _numbers(kind: Any, candidates: tuple[Any, ...], *, step: float) -> Strategy:
    limits = [
        kind.ge, kind.le, None if kind.gt is None else kind.gt + step,
        None if kind.lt is None else kind.lt - step,
    ]  # fmt: skip

    def is_within(one: float) -> bool:
        return all(
            limit is None or holds
            for limit, holds in (
                (kind.ge, kind.ge is not None and one >= kind.ge),
                (kind.gt, kind.gt is not None and one > kind.gt),
                (kind.le, kind.le is not None and one <= kind.le),
                (kind.lt, kind.lt is not None and one < kind.lt),
            )
        )

    found = [one for one in (*candidates, *limits) if one is not None and is_within(one)]
    return st.sampled_from(found)


def objects_of(kind: inspect.StructType, hints: Hints) -> Strategy:
    """Bodies of a schema: all required fields and some of the others."""
    names = tuple(field.encode_name for field in kind.fields)
    required = tuple(field.encode_name for field in kind.fields if field.required)
    by_name = {
        field.encode_name: _field_values(field.encode_name, field.type, hints)
        for field in kind.fields
    }

    @st.composite
    def draw_object(draw: Callable[[Strategy], Any]) -> dict[str, Any]:
        optional = draw(st.lists(st.sampled_from(names), max_size=4, unique=True)) if names else []
        return {name: draw(by_name[name]) for name in dict.fromkeys((*required, *optional))}

    return draw_object()


def _field_values(name: str, kind: inspect.Type, hints: Hints) -> Strategy:
    typed = values_of(kind, hints)
    hint = hints.get(name)
    # Mostly accepted values: a body with one odd value finds more than one with ten.
    return typed if hint is None else st.one_of(*[hint] * 19, typed)


# ---- spoiling --------------------------------------------------------------------------


@st.composite
def mutated(draw: Callable[[Strategy], Any], value: Any) -> Any:
    """`value` with one error somewhere inside."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(value)))
        return {**value, name: draw(mutated(value[name]))}
    if isinstance(value, list) and value and draw(st.booleans()):
        position = draw(st.integers(0, len(value) - 1))
        return [*value[:position], draw(mutated(value[position])), *value[position + 1 :]]
    if isinstance(value, dict) and draw(st.booleans()):
        return draw(_mutated_object(value))
    mutation = draw(st.integers(0, 9))
    if mutation == 0:
        return [value] * draw(st.sampled_from((1, 2, 40)))
    if mutation == 1:
        return nested(draw(depths), in_objects=draw(st.booleans()))
    return draw(wrong)


@st.composite
def _mutated_object(draw: Callable[[Strategy], Any], value: dict[str, Any]) -> Any:
    mutation = draw(st.sampled_from(("more", "less", "twice")))
    items = tuple(value.items())
    if mutation == "more" or not items:
        name = draw(st.sampled_from(("x", "prompt", "max_token", "", "\0", "\ud800", "a" * 3000)))
        return {**value, name: draw(wrong)}
    position = draw(st.integers(0, len(items) - 1))
    if mutation == "less":
        return dict(items[:position] + items[position + 1 :])
    again = (items[position][0], draw(wrong))
    return Pairs((*items, again) if draw(st.booleans()) else (again, *items))
