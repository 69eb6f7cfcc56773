"""Anthropic's bodies: what chat templates get of them, and what is refused by name."""

import json
from typing import Any

import pytest

from app.anthropic.answers import error_of
from app.anthropic.bodies import MESSAGES_BODY, set_options
from app.anthropic.conversation import chat_of
from app.route.decoding import decode_body
from app.route.fields import ChatFields
from titopool.errors import InvalidRequest, PromptTooLong

TEXT = {"type": "text", "text": "Hello"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {"word": "tito"}}
CALLED = {
    "id": "a",
    "type": "function",
    "function": {"name": "look", "arguments": {"word": "tito"}},
}


def sent(**fields: Any) -> Any:
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return decode_body(json.dumps(body).encode(), MESSAGES_BODY)


def chat(**fields: Any) -> ChatFields:
    return chat_of(sent(**fields).fields)


def test_results_of_tools_are_messages_of_their_own_in_their_order():
    result = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT, IMAGE]}
    none = {"type": "tool_result", "tool_use_id": "b", "is_error": True}
    messages = [{"role": "user", "content": [result, none, TEXT, IMAGE]}]
    assert chat(messages=messages).messages == [
        {"role": "tool", "tool_call_id": "a", "content": [TEXT, PART]},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": [TEXT, PART]},
    ]


def test_blocks_of_a_turn_are_one_message_without_breaks():
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "of nobody"},
        {"type": "text", "text": "I "},
        {"type": "text", "text": "look."},
        CALL,
    ]
    last = {"role": "user", "content": "And?"}
    messages = chat(messages=[{"role": "assistant", "content": blocks}, last]).messages
    assert messages == [
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [CALLED]},
        last,
    ]


def test_a_call_whose_arguments_were_no_json_goes_back_as_its_text():
    given = {**CALL, "input": {"INVALID_JSON": "{a"}}
    last = {"role": "user", "content": "And?"}
    (message, _) = chat(messages=[{"role": "assistant", "content": [given]}, last]).messages
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": "{a"}


@pytest.mark.parametrize(
    "name", ["reasoning_effort", "response_format", "vllm_xargs", "chat_template", "tokens", "n"]
)
def test_fields_of_other_routes_are_refused_by_name(name: str):
    with pytest.raises(InvalidRequest, match=f"^{name}: expected") as caught:
        sent(**{name: 3})
    assert caught.value.param == name


def test_values_of_other_routes_that_ask_for_nothing_are_accepted():
    neutral = {
        "logprobs": False, "top_logprobs": 0, "parallel_tool_calls": True, "n": 1, "echo": False,
        "include_reasoning": True, "add_generation_prompt": True, "return_weight_versions": False,
        "context_management": {"edits": [{"keep": {"type": "all"}}]},
    }  # fmt: skip
    assert sent(**neutral).unknown == []


def test_system_prompts_stand_first_without_the_harness_s_own_header():
    header = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    messages = [
        {"role": "user", "content": "Hello"}, {"role": "system", "content": [TEXT, header]},
        {"role": "system", "content": [header]}, {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    found = chat(system=[header, TEXT], messages=messages).messages
    assert found[0] == {"role": "system", "content": [TEXT]}
    assert found[2] == {"role": "developer", "content": [TEXT]}
    assert len(found) == 4
    assert chat(system=[header]).messages[0]["role"] == "user"


@pytest.mark.parametrize(
    "choice, expected, is_parallel",
    [
        (None, None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
    ],
)
def test_tools_and_their_choice_are_openais(choice, expected, is_parallel):
    tool = {"name": "f", "input_schema": {"type": "object"}, "type": "custom", "cache_control": {}}
    found = chat(tools=[tool], tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == (expected, is_parallel)
    (function,) = (one["function"] for one in found.tools or ())
    assert (function["name"], function["parameters"]) == ("f", {"type": "object"})


@pytest.mark.parametrize(
    "fields, template, effort",
    [
        ({}, {}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ({"thinking": {"type": "adaptive", "display": "x"}}, {"enable_thinking": True}, None),
        (
            {
                "thinking": {"type": "disabled"},
                "chat_template_kwargs": {"enable_thinking": True},
                "output_config": {"effort": "max"},
            },
            {"enable_thinking": True},
            "max",
        ),
    ],
)
def test_thinking_and_effort_are_the_template_s(fields, template, effort):
    found = chat(**fields)
    assert (found.chat_template_kwargs, found.reasoning_effort) == (template, effort)


@pytest.mark.parametrize("budget, expected", [(6, 6), (7, None), (1_000, None)])
def test_a_budget_that_leaves_no_answer_is_none(budget: int, expected: int | None):
    body = sent(thinking={"type": "enabled", "budget_tokens": budget})
    set_options(body, can_limit_thoughts=True)
    assert body.options.thinking_token_budget == expected
    if expected is not None:
        with pytest.raises(InvalidRequest, match="--reasoning-parser"):
            set_options(body, can_limit_thoughts=False)


def test_a_schema_is_a_grammar_and_only_one():
    form = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
    body = sent(**form, stop_sequences=["a"])
    set_options(body, can_limit_thoughts=False)
    assert body.options.structured_outputs.json == {"type": "object"}
    assert (body.options.max_tokens, body.options.stop) == (8, ["a"])
    with pytest.raises(InvalidRequest, match="either output_config"):
        set_options(sent(**form, structured_outputs={"regex": "a"}), can_limit_thoughts=False)


MESSAGES: dict[str, tuple[Any, str]] = {
    "no object": (["a"], r"messages\[0\].content\[0\]: expected an object"),
    "a number": (3, r"messages\[0\].content: expected a text or a list"),
    "no text": ([{"type": "text"}], r"messages\[0\].content\[0\]: expected a block of type text"),
    "an image by file": ([{**IMAGE, "source": {"type": "file"}}], "a source of type base64"),
    "a result of no call": (
        [{"type": "tool_result", "tool_use_id": 3}],
        r"messages\[0\].content\[0\].tool_use_id: expected a text, got 3",
    ),
    "a nested result": (
        [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_result"}]}],
        r"messages\[0\].content\[0\].content\[0\]: expected a block of type",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_a_malformed_message_is_refused_with_its_place(case: str):
    content, expected = MESSAGES[case]
    with pytest.raises(InvalidRequest, match=expected) as caught:
        chat(messages=[{"role": "user", "content": content}])
    assert caught.value.param == "messages"


def test_an_error_has_anthropics_shape_and_the_server_s_code():
    body = PromptTooLong("messages: expected less", param="messages").to_dict("a")
    error = error_of(body, 400)
    assert error == {
        "type": "error",
        "request_id": "a",
        "error": {
            "type": "invalid_request_error",
            "code": "prompt_too_long",
            "message": "prompt is too long: messages: expected less",
            "param": "messages",
            "request_id": "a",
        },
    }
    kinds = {401: "authentication_error", 409: "invalid_request_error", 429: "rate_limit_error",
             500: "api_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip
    assert {status: error_of(body, status)["error"]["type"] for status in kinds} == kinds
