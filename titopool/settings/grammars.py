"""Structured outputs: a client's grammars, and the bounds that a front end checks without an engine.

The engine computes a mask over the whole vocabulary for each token of a grammar, within the step of
all requests. Some short grammars make a mask take minutes. The bounds here are cheap and refuse
what is known to explode; what passes is tried by the worker (`workers/engine/grammars/`).
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from titopool.errors import InvalidRequest

NonEmptyStr = Annotated[str, Meta(min_length=1)]
# vLLM 0.32 refuses deeper schemas. Older versions walk a schema recursively. orjson, which encodes
# a render, takes 254 levels.
MAX_JSON_DEPTH = 64
MAX_GRAMMAR_BYTES = 64 * 1024
# The product of counted repetitions inside each other: `(a{1,20}){1,30}` has 600. With xgrammar 0.2.8
# and 150,000 tokens, a mask of ((a{1,20}){1,20}){1,20} (8,000) takes 74 ms, of spaces 660 ms.
MAX_REPETITIONS = 5_000
# xgrammar makes a rule for each property and count: 400 properties of which 200 are needed take
# longer than 8 s, 40 and 20 take 0.3 s.
MAX_COUNTED_PROPERTIES = 2_000


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's StructuredOutputsParams. Exactly one of the first six fields is set."""

    json: NonEmptyStr | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: NonEmptyStr | None = None
    json_object: bool | None = None
    structural_tag: NonEmptyStr | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


def check_grammar(structured: StructuredOutputs) -> None:
    """Raises InvalidRequest for a grammar that is malformed or exceeds a bound."""
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = [kind for kind in kinds if getattr(structured, kind) is not None]
    num_bytes = encoded_size(structured)
    problem = ""
    if len(given) != 1:
        problem = f"exactly one of {', '.join(kinds)}, got {', '.join(given) or 'none'}"
    elif structured.json_object is False:
        problem = "json_object to be true, got false"
    elif "\0" in (structured.regex or ""):
        problem = "a regex without NUL characters, got a regex with NUL"
    elif num_bytes > MAX_GRAMMAR_BYTES:
        problem = f"at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}; send a shorter grammar"
    elif is_deeper_than(MAX_JSON_DEPTH, structured.json):
        problem = f"a JSON schema of at most {MAX_JSON_DEPTH} levels, got a deeper schema"
    else:
        problem = _exceeded_bound(structured)
    if problem:
        raise InvalidRequest(f"structured_outputs: expected {problem}", param="structured_outputs")


def encoded_size(value: Any) -> int:
    """Bytes of `value` on the wire; 0 for a value that cannot be encoded, which is refused later."""
    try:
        return len(msgspec.msgpack.encode(value))
    except (OverflowError, RecursionError, UnicodeEncodeError):
        return 0


def _exceeded_bound(structured: StructuredOutputs) -> str:
    for text in (structured.regex, structured.whitespace_pattern):
        if problem := _too_many_repetitions(text, is_regex=True):
            return problem
    if problem := _too_many_repetitions(structured.grammar, is_regex=False):
        return problem
    return exceeded_by_schema(structured.json) or exceeded_by_schema(structured.structural_tag)


def exceeded_by_schema(schema: str | dict[str, Any] | None) -> str:
    """What was expected of a JSON schema or structural tag and what came; "" if it is in bounds."""
    for node in _objects_in(schema):
        for text in (node.get("pattern"), *_keys(node, "patternProperties")):
            if problem := _too_many_repetitions(text, is_regex=True):
                return problem
        if problem := _too_many_repetitions(node.get("grammar"), is_regex=False):
            return problem
        num_properties = len(_keys(node, "properties"))
        limits = [node.get(name) for name in ("minProperties", "maxProperties")]
        counted = max((one for one in limits if isinstance(one, int | float)), default=0)
        # Properties that are not named cost little.
        if (num_rules := num_properties * min(counted, num_properties)) > MAX_COUNTED_PROPERTIES:
            return (
                f"at most {MAX_COUNTED_PROPERTIES} for the number of properties times minProperties "
                f"or maxProperties, got {num_rules}; leave minProperties and maxProperties out"
            )
    return ""


def _too_many_repetitions(text: Any, *, is_regex: bool) -> str:
    """`text` is anything that stands where a schema has a pattern."""
    num_repetitions = nested_repetitions(text, is_regex=is_regex) if isinstance(text, str) else 1
    if num_repetitions <= MAX_REPETITIONS:
        return ""
    return (
        f"at most {MAX_REPETITIONS} for the product of counted repetitions inside each other, got "
        f"{num_repetitions} in {text[:80]!r}; use smaller counts, or * and +"
    )


_TOKENS = re.compile(
    r"""
    \\. | \[(?:\\.|[^\]\\])*\]?                                # an escape, a class
    | "(?:\\.|[^"\\\n])*"                                      # a literal of a grammar
    | (?P<open>\() | (?P<close>\))
    | \{\s*(?P<least>\d*)\s*(?:,\s*(?P<most>\d*)\s*)?\}          # {2}, {1,20}, {1,}
    | ~\s*(?P<lark_least>\d+)(?:\s*\.\.\s*(?P<lark_most>\d+))?   # Lark's ~ 1..20
    | (?P<same>[*+?\s]) | [^\\\[\]"(){}~*+?\s]+ | .           # plain text, or one character
    """,
    re.VERBOSE | re.DOTALL,
)
# Larger counts are compared as this one.
_MANY = 10**9


def nested_repetitions(text: str, *, is_regex: bool) -> int:
    """The greatest product of counted repetitions inside each other; 1 if none is inside another.

    A repetition without an upper limit counts with its lower one. Rules of a grammar (EBNF or Lark)
    that repeat each other are not multiplied.
    """
    if is_regex:
        # Quotes have no meaning in it: they must not hide a repetition.
        text = text.replace('"', "'")
    largest = last = 1
    # The greatest product in each open group.
    groups = [1]
    for token in _TOKENS.finditer(text):
        kind = token.lastgroup
        if kind == "open":
            groups.append(1)
            last = 1
        elif kind == "close":
            last = groups.pop() if len(groups) > 1 else 1
        elif kind is None:
            last = 1
        elif kind != "same":
            # Without a number, it is no repetition.
            count = _count(token)
            if last > 1:
                largest = max(largest, last * count)
            last = min(last * count, _MANY) if count else 1
        groups[-1] = max(groups[-1], last)
    return min(largest, _MANY)


def _count(token: re.Match[str]) -> int:
    """The count of a repetition; 0 for another token."""
    names = ("least", "most", "lark_least", "lark_most")
    counts = [
        _MANY if len(digits) > 9 else int(digits) for name in names if (digits := token[name])
    ]
    return max(counts, default=0)


def _objects_in(schema: str | dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Every object of a schema that is not deeper than `MAX_JSON_DEPTH`, or of its JSON text."""
    nodes: list[Any] = [schema]
    if isinstance(schema, str):
        try:
            nodes = [msgspec.json.decode(schema)]
        except (msgspec.DecodeError, RecursionError):
            # vLLM refuses it.
            return
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            yield node
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)


def _keys(node: dict[str, Any], name: str) -> list[str]:
    value = node.get(name)
    return list(value) if isinstance(value, dict) else []


def is_deeper_than(limit: int, schema: str | dict[str, Any] | None) -> bool:
    """Whether a JSON schema has more than `limit` levels. vLLM refuses a text that is not JSON."""
    if isinstance(schema, str):
        try:
            level = [msgspec.json.decode(schema)]
        except msgspec.DecodeError:
            return False
        except RecursionError:
            return True
    else:
        level = [schema]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return any(isinstance(node, dict | list) for node in level)
