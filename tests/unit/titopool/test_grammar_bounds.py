"""The bounds on grammars that a front end checks: what they refuse, and what honest use sends."""

import json
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.hostile_grammars import regexes
from harness.tool_schemas import TOOL_SCHEMAS
from tests.kit.workers.pools import FACTS
from titopool.errors import InvalidRequest
from titopool.settings.grammars import (
    MAX_GRAMMAR_BYTES,
    MAX_REPETITIONS,
    StructuredOutputs,
    check_grammar,
    exceeded_by_schema,
    nested_repetitions,
)
from titopool.settings.sampling import MAX_OPTIONS_BYTES, SamplingOptions, check_sampling

NESTED = "((a{1,60}){1,60}){1,60}"


def properties(num: int, **more) -> dict:
    return {"properties": {f"p{index}": {} for index in range(num)}, **more}


@pytest.mark.parametrize(
    ("structured", "bound"),
    [
        ({"regex": NESTED}, MAX_REPETITIONS),
        ({"regex": "(( {1,20}){1,20}){1,20}"}, MAX_REPETITIONS),
        ({"regex": '"((a{1,60}){1,60}){1,60}"'}, MAX_REPETITIONS),
        ({"grammar": 'root ::= (("a"{1,60}){1,60}){1,60}'}, MAX_REPETITIONS),
        ({"grammar": 'root ::= [^"] (([a]{1,60}){1,60}){1,60} "b"'}, MAX_REPETITIONS),
        ({"grammar": 'start: (("a"~1..60)~1..60)~1..60'}, MAX_REPETITIONS),
        ({"json": {"type": "string", "pattern": f"^{NESTED}$"}}, MAX_REPETITIONS),
        ({"json": json.dumps({"items": [{"pattern": NESTED}]})}, MAX_REPETITIONS),
        ({"json": {"patternProperties": {NESTED: {}}}}, MAX_REPETITIONS),
        ({"json": {}, "whitespace_pattern": NESTED}, MAX_REPETITIONS),
        ({"structural_tag": json.dumps({"a": [{"pattern": NESTED}]})}, MAX_REPETITIONS),
        ({"structural_tag": json.dumps({"grammar": f"root ::= {NESTED}"})}, MAX_REPETITIONS),
        ({"json": properties(400, minProperties=200)}, "minProperties"),
        ({"regex": "a" * MAX_GRAMMAR_BYTES}, MAX_GRAMMAR_BYTES),
        ({"choice": [f"choice-{number}" for number in range(10_000)]}, MAX_GRAMMAR_BYTES),
        ({"json": {"enum": [f"value-{number}" for number in range(10_000)]}}, MAX_GRAMMAR_BYTES),
    ],
    ids=str,
)  # fmt: skip
def test_an_exceeded_bound_is_named(structured, bound):
    with pytest.raises(
        InvalidRequest, match=f"^structured_outputs: expected.*{bound}.*got.*;"
    ) as at:
        check_grammar(StructuredOutputs(**structured))
    assert at.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": r"(\d{1,3}\.){3}\d{1,3}"},
        {"regex": r"[a-z]{1,100}( [a-z]{1,100}){0,49}"},
        {"regex": ".{0,60000}"},
        {"regex": r"\(\({60}\(\{1,60}\)\{1,60}[(]{60}[){60}]"},
        {"grammar": 'root ::= "((a{1,60}){1,60}){1,60}"'},
        {"json": properties(100)},
        {"json": properties(30, maxProperties=1000)},
        {"json": {"type": "array", "maxItems": 100, "items": {"type": "string", "maxLength": 100}}},
        {"json": {"properties": {"pattern": {"type": "string"}, "properties": {"minProperties": 1}}}},
        {"choice": ["yes", "no"]},
    ],
    ids=str,
)  # fmt: skip
def test_honest_grammars_pass(structured):
    check_grammar(StructuredOutputs(**structured))


@pytest.mark.parametrize("name", TOOL_SCHEMAS)
def test_tool_definitions_pass(name):
    assert exceeded_by_schema(TOOL_SCHEMAS[name]) == ""


@given(regexes())
@settings(max_examples=200)
def test_products_of_nested_counts(regex):
    text, product = regex
    # A count that is not inside another one is no product.
    assert nested_repetitions(f"({text}){{2}}", is_regex=True) == (
        2 * product if product > 1 else 1
    )


@given(st.text(alphabet='a(){}[]\\1,9*"~.| \n', max_size=300), st.booleans())
@settings(max_examples=300)
def test_any_text_is_scanned(text, is_regex):
    assert nested_repetitions(text, is_regex=is_regex) >= 1


@pytest.mark.parametrize(
    "piece", ["(", "[", "\\", "{1,", "((a{9}){9})", '"', "{" + "9" * 50, "~1.."]
)
def test_a_long_text_is_scanned_fast(piece):
    text = (piece * MAX_GRAMMAR_BYTES)[:MAX_GRAMMAR_BYTES]
    began_s = time.thread_time()
    nested_repetitions(text, is_regex=False)
    assert time.thread_time() - began_s < 2


def test_other_options_are_bounded():
    options = SamplingOptions(extra_args={"a": "b" * MAX_OPTIONS_BYTES})
    facts = msgspec.structs.replace(FACTS, sampling_fields=list(SamplingOptions.__struct_fields__))
    match = f"^extra_args: expected at most {MAX_OPTIONS_BYTES} bytes"
    with pytest.raises(InvalidRequest, match=match) as at:
        check_sampling(options, facts)
    assert at.value.param == "extra_args"
