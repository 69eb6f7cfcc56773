"""Bodies of the Responses API become chats, or are refused by name."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from app.responses.bodies import (
    RESPONSES_BODY,
    ResponsesFields,
    set_options,
)
from app.responses.items import translate
from app.route.decoding import decode_body
from app.route.fields import ChatFields
from app.route.open_bodies import Sent
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions

USER = {"role": "user", "content": "a"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [],
           "content": [{"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
TEXT = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]}  # fmt: skip
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "d"}
IN_CHAT = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def sent(**fields: Any) -> Sent[ResponsesFields]:
    return decode_body(json.dumps({"input": "a"} | fields).encode(), RESPONSES_BODY)


def chat(*items: Any, **fields: Any) -> ChatFields:
    return translate(sent(input=list(items), **fields).fields)


def prepare(fields: dict[str, Any]) -> None:
    found = sent(**fields)
    set_options(found.fields, found.options)
    translate(found.fields)


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    "items, messages",
    [
        # A turn is one message.
        ([THOUGHT, TEXT, CALL], [assistant(reasoning="hm", content="b", tool_calls=[IN_CHAT])]),
        ([CALL, CALL], [assistant(tool_calls=[IN_CHAT, IN_CHAT])]),
        ([CALL, TEXT, CALL], [assistant(content="b", tool_calls=[IN_CHAT, IN_CHAT])]),
        # Reasoning and a second text begin another one.
        (
            [THOUGHT, THOUGHT, CALL],
            [assistant(reasoning="hm"), assistant(reasoning="hm", tool_calls=[IN_CHAT])],
        ),
        (
            [TEXT, CALL, TEXT],
            [assistant(content="b", tool_calls=[IN_CHAT]), assistant(content="b")],
        ),
        ([TEXT, TEXT], [assistant(content="b"), assistant(content="b")]),
        (
            [CALL, THOUGHT, TEXT],
            [assistant(tool_calls=[IN_CHAT]), assistant(reasoning="hm", content="b")],
        ),
        (
            [TEXT, USER, TEXT],
            [assistant(content="b"), {"role": "user", "content": "a"}, assistant(content="b")],
        ),
        (
            [CALL, OUTPUT, CALL],
            [
                assistant(tool_calls=[IN_CHAT]),
                {"role": "tool", "tool_call_id": "c1", "content": "d"},
                assistant(tool_calls=[IN_CHAT]),
            ],
        ),
        # Reasoning is its text, else its summary; encrypted, it is nothing.
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, TEXT],
            [assistant(reasoning="s", content="b")],
        ),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], []),
        ([{"type": "reasoning", "content": None, "summary": []}, CALL], [assistant(tool_calls=[IN_CHAT])]),
        # Parts of a model's text are one text; those of others stay parts.
        (
            [{"role": "assistant", "content": [*TEXT["content"], {"type": "refusal", "refusal": "c"}]}],
            [assistant(content="bc")],
        ),
        (
            [
                {
                    "role": "developer",
                    "content": [
                        {"type": "input_text", "text": "a", "new": 1},
                        {"type": "input_image", "image_url": "data:,x", "detail": "auto"},
                    ],
                }
            ],
            [
                {
                    "role": "developer",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": "data:,x"},
                    ],
                }
            ],
        ),
        (
            [{**OUTPUT, "output": [{"type": "input_text", "text": "d"}]}],
            [{"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "d"}]}],
        ),
    ],
)  # fmt: skip
def test_items_of_a_turn_are_one_message(items, messages):
    assert chat(*items).messages == messages


def test_instructions_come_first():
    system = {"role": "system", "content": "be brief"}
    assert chat(USER, instructions="be brief").messages == [system, USER]
    assert translate(sent(instructions="be brief").fields).messages == [system, USER]


def test_tools_and_the_choice_have_the_form_of_chats():
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True, "cache": 1}
    found = chat(USER, tools=[tool], tool_choice={"type": "function", "name": "f"})
    assert found.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    ]
    assert found.tool_choice == {"type": "function", "function": {"name": "f"}}
    # Clients send "auto" without tools, too.
    assert chat(USER, tool_choice="auto").tool_choice is None


@pytest.mark.parametrize(
    "form, expected",
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "name": "a", "schema": {}, "strict": True}, {"json": {}}),
    ],
)
def test_a_format_is_a_grammar(form, expected):
    fields, options, _ = sent(text={"format": form}, max_output_tokens=5)
    set_options(fields, options)
    assert options.max_tokens == 5
    found = options.structured_outputs
    assert (None if found is None else msgspec.to_builtins(found)) == expected


def test_log_probabilities_are_included_on_request():
    assert sent(top_logprobs=3).fields.num_logprobs is None
    asked = {"include": ["message.output_text.logprobs"]}
    assert [sent(top_logprobs=n, **asked).fields.num_logprobs for n in (0, 3)] == [0, 3]


def test_every_field_of_openai_is_known():
    known = {*ResponsesFields.__struct_fields__, *SamplingOptions.__struct_fields__}
    assert (
        not {*ResponseCreateParamsNonStreaming.__annotations__} - known - {*RESPONSES_BODY.unused}
    )
    assert sent(new_field=1, top_k=3, seed=None).unknown == ["new_field"]


@pytest.mark.parametrize(
    "fields, location",
    [
        ({"input": [{}]}, "input[0]: expected an item"),
        ({"input": [USER, {"type": ["message"]}]}, "input[1]: expected an item"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]: "),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role: "),
        ({"input": [{"role": "user"}]}, "input[0].content: "),
        ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]: "),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input[0].content[0]: "),
        ({"input": [{**TEXT, "content": [{"type": "input_image"}]}]}, "input[0].content[0]: "),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments: "),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id: "),
        ({"input": [{**OUTPUT, "output": [{"type": "input_file"}]}]}, "input[0].output[0]: "),
        ({"input": [{"type": "reasoning", "content": [USER]}]}, "input[0].content[0]: "),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "custom"}]}, "tools[1]: "),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice: "),
        ({"tool_choice": "any"}, "tool_choice: "),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format: "),
        ({"text": {"format": {"type": "lark"}}}, "text.format.type: "),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text.format: "),
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort: "),
        ({"include": ["a"]}, "include: "),
        ({"stream_options": {}}, "stream_options: "),
        ({"store": 1, "logprobs": 1}, "logprobs: "),
        ({"background": True}, "background: "),
    ],
)  # fmt: skip
def test_a_refusal_says_where(fields, location):
    with pytest.raises(InvalidRequest) as caught:
        prepare(fields)
    assert caught.value.message.startswith(location)
    assert caught.value.param == location.partition(":")[0].partition("[")[0].partition(".")[0]
