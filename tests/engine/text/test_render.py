"""`/v1/chat/completions/render` and `/v1/completions/render` of text; images: tests/engine/images."""

import json
from typing import Any

import pytest

from app.openai.bodies import CHAT_COMPLETIONS_BODY
from app.route.decoding import decode_body
from app.vllm.bodies import GENERATE_BODY
from harness.hostile_requests import nested
from harness.servers import Server
from tests.kit.peers.vllm_protocol import GENERATE, read_by_vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is it?"}]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
MAX_LEN = 1024


def rendered(server: Server, path: str, body: dict[str, Any], **headers: str) -> Any:
    answer = server.post(path + "/render", body, headers=headers)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for one in found if isinstance(found, list) else [found]:
        read_by_vllm("GenerateRequest", json.dumps(one).encode())
    return found


def generated(server: Server, body: dict[str, Any]) -> Any:
    answer = server.post(GENERATE, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"messages": [{"role": "developer", "content": "Be short."}, *QUESTION]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
    "tools": {"tools": [TOOL]},
    "tools-off": {"tools": [TOOL], "tool_choice": "none"},
    "template": {"chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"reasoning_effort": "none"},
    "continued": {
        "messages": [*QUESTION, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False, "continue_final_message": True,
    },
    "options": {
        "n": 2, "seed": 3, "temperature": 0.7, "top_p": 0.9, "logprobs": True, "top_logprobs": 2,
        "logit_bias": {"7": 3.5}, "stop": ["zz"], "stop_token_ids": [9], "cache_salt": "a",
        "session_id": "b",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_a_rendered_chat_generates_what_the_chat_does(single_server: Server, name: str):
    body = {
        "messages": QUESTION, "max_tokens": 8, "temperature": 0, "return_token_ids": True,
        **CHATS[name],
    }  # fmt: skip
    expected = single_server.post(CHAT, body).json()
    found = rendered(single_server, CHAT, body, **{"X-Request-Id": "mine"})
    assert found["request_id"] == "mine"
    assert found["features"] is None
    assert found["token_ids"] == expected["prompt_token_ids"]
    for name in ("cache_salt", "session_id"):
        assert found.get(name) == body.get(name)
    # The same options reach the engine.
    _, options = decode_body(json.dumps(body).encode(), CHAT_COMPLETIONS_BODY)
    options.max_tokens, options.detokenize = 8, False
    options.logprobs = body.get("top_logprobs")
    # Only this route returns routed experts.
    options.routed_experts_prompt_start = 0
    assert decode_body(json.dumps(found).encode(), GENERATE_BODY)[1] == options
    answer = generated(single_server, found)
    assert answer["prompt_token_ids"] == expected["prompt_token_ids"]
    for choice, wanted in zip(answer["choices"], expected["choices"], strict=True):
        assert choice["token_ids"] == wanted["token_ids"]


def test_completions_are_rendered_prompt_by_prompt(single_server: Server):
    for prompt in ("Hello", ["Hello", "a b c"], [5, 6], [[5, 6], [7]]):
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        expected = single_server.post(COMPLETIONS, body).json()["choices"]
        found = rendered(single_server, COMPLETIONS, body, **{"X-Request-Id": "mine"})
        assert [one["token_ids"] for one in found] == [one["prompt_token_ids"] for one in expected]
        names = ["mine"] if len(found) == 1 else ["mine-0", "mine-1"]
        assert [one["request_id"] for one in found] == names
        for one, wanted in zip(found, expected, strict=True):
            # The default of /v1/completions, which /inference/v1/generate does not have.
            assert one["sampling_params"]["max_tokens"] == 16
            (choice,) = generated(single_server, one)["choices"]
            assert choice["token_ids"] == wanted["token_ids"]


def test_a_stream_stays_one(single_server: Server):
    options = {"include_usage": True}
    body = {"messages": QUESTION, "max_tokens": 3, "stream": True, "stream_options": options}
    found = rendered(single_server, CHAT, body)
    assert (found["stream"], found["stream_options"]["include_usage"]) == (True, True)
    answer = single_server.post(GENERATE, found)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert '"completion_tokens":3' in answer.text


def test_without_a_limit_the_context_is_one(single_server: Server):
    found = rendered(single_server, CHAT, {"messages": QUESTION})
    assert found["sampling_params"] == {"max_tokens": MAX_LEN - len(found["token_ids"])}
    found = rendered(single_server, CHAT, {"messages": QUESTION, "max_tokens": 10**6})
    assert found["sampling_params"] == {"max_tokens": MAX_LEN - len(found["token_ids"])}


HUGE = {
    "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "maximum": 2**70}},
}  # fmt: skip
BAD = {
    CHAT: [
        {"messages": []},
        {"messages": [{"content": "a"}]},
        {"messages": QUESTION, "chat_template": "x"},
        {"messages": QUESTION, "chat_template_kwargs": {"tokenize": False}},
        {"messages": QUESTION, "model": "none"},
        {"messages": QUESTION, "tokens": [1, 2]},
        {"messages": QUESTION, "unknown": 1},
        {"messages": QUESTION, "top_logprobs": 3},
        {"messages": QUESTION, "n": 10**6},
        {"messages": QUESTION, "extra_args": nested(300)},
        {"messages": QUESTION, "response_format": HUGE},
        {"messages": QUESTION, "temperature": 0, "n": 2},
        {"messages": QUESTION, "logit_bias": {"999999": 1}},
        {"messages": [{"role": "user", "content": "a " * 2000}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "AA=="}]}]},
    ],
    COMPLETIONS: [
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [[5], "a"]},
        {"prompt": [10**6]},
        {"prompt": "a", "echo": True, "stream": True},
        {"prompt": "a", "extra_args": {"a": 2**70}},
        {"prompt": "a", "mm_processor_kwargs": {"max_pixels": 1}},
    ],
}


@pytest.mark.parametrize("path", BAD)
def test_a_render_refuses_what_its_route_refuses(single_server: Server, path: str):
    for body in BAD[path]:
        expected = single_server.post(path, body)
        found = single_server.post(path + "/render", body)
        assert expected.status_code in (400, 404), expected.text
        assert found.status_code == expected.status_code
        found_error, expected_error = found.json()["error"], expected.json()["error"]
        assert found_error.pop("request_id") != expected_error.pop("request_id")
        assert found_error == expected_error


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "look_up"}}])
def test_a_call_that_a_grammar_enforces_is_not_rendered(single_server: Server, choice: Any):
    body = {"messages": QUESTION, "tools": [TOOL], "tool_choice": choice}
    answer = single_server.post(CHAT + "/render", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tool_choice")
    assert "expected auto or none" in error["message"]
