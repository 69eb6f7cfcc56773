"""OpenAI's routes compared with vLLM's own server: same bodies, same text, ids and numbers."""

import pytest
from transformers import AutoTokenizer

from harness.servers import Server
from tests.kit.peers.vllm_serve import (
    CHAT,
    CHAT_BODIES,
    CHATS,
    COMPLETION_BODIES,
    COMPLETIONS,
    TOOLS,
    WHOLE_BODIES,
    Body,
    Greedy,
    assert_same,
    body_of,
    invalid_utf8,
    post,
)

USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def assert_same_responses(server: Server, vllm_url: str, path: str, body: dict) -> None:
    our_response, vllm_response = post(server.url, path, body), post(vllm_url, path, body)
    assert vllm_response.status_code == 200, vllm_response.text
    assert our_response.status_code == 200, our_response.text
    ours, expected = our_response.json(), vllm_response.json()
    assert len(ours["choices"]) == len(expected["choices"])
    for mine, other in zip(ours["choices"], expected["choices"], strict=True):
        assert_same(client_view(mine, path), client_view(other, path), f"choices[{mine['index']}]")
    assert ours.get("prompt_token_ids") == expected.get("prompt_token_ids")
    assert_same(ours.get("prompt_logprobs"), expected.get("prompt_logprobs"), "prompt_logprobs")
    assert ours["object"] == expected["object"]
    assert {key: ours["usage"][key] for key in USAGE} == {
        key: expected["usage"][key] for key in USAGE
    }


def client_view(choice: dict, path: str) -> dict:
    """The fields of a choice that a client reads; fields not requested may be null or missing."""
    keys = ("index", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids",
            "prompt_logprobs")  # fmt: skip
    text = choice["message"]["content"] if path == CHATS else choice["text"]
    return {"text": text, **{key: choice.get(key) for key in keys}}


@pytest.mark.parametrize("body", COMPLETION_BODIES.values(), ids=COMPLETION_BODIES)
def test_completions_agree(server: Server, vllm_url: str, greedy: Greedy, body: Body):
    assert_same_responses(server, vllm_url, COMPLETIONS, body_of(body, greedy, COMPLETIONS))


@pytest.mark.parametrize("body", CHAT_BODIES.values(), ids=CHAT_BODIES)
def test_chat_completions_agree(server: Server, vllm_url: str, greedy: Greedy, body: Body):
    assert_same_responses(server, vllm_url, CHATS, body_of(body, greedy, CHATS))


@pytest.mark.parametrize("path, body", WHOLE_BODIES.values(), ids=WHOLE_BODIES)
def test_requests_that_cannot_stream_agree(
    server: Server, vllm_url: str, greedy: Greedy, path: str, body: dict
):
    assert_same_responses(server, vllm_url, path, body_of(body, greedy, path))


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_invalid_utf8_at_the_end_agrees(server: Server, vllm_url: str, tiny_model: str, path: str):
    body = invalid_utf8(AutoTokenizer.from_pretrained(tiny_model), path)
    assert_same_responses(server, vllm_url, path, body)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hello, ü!", "return_token_strs": True},
        {"prompt": "<|im_start|>a", "add_special_tokens": False},
        {"prompt": ""},
        {"messages": CHAT},
        {"messages": CHAT, "add_generation_prompt": False, "return_token_strs": True},
        {"messages": CHAT, "tools": TOOLS, "chat_template_kwargs": {"a": 1}},
        {
            "messages": [*CHAT, {"role": "assistant", "content": "The"}],
            "add_generation_prompt": False, "continue_final_message": True,
        },
    ],
)  # fmt: skip
def test_tokenize_agrees(server: Server, vllm_url: str, body: dict):
    ours, expected = post(server.url, "/tokenize", body), post(vllm_url, "/tokenize", body)
    assert expected.status_code == 200, expected.text
    assert ours.json() == expected.json()


@pytest.mark.parametrize("tokens", [[42, 1, 1393, 2, 0], [300, 301, 302], [230, 159], []])
def test_detokenize_agrees(server: Server, vllm_url: str, tokens: list[int]):
    ours = post(server.url, "/detokenize", {"tokens": tokens})
    assert ours.json() == post(vllm_url, "/detokenize", {"tokens": tokens}).json()


@pytest.mark.parametrize(
    "path, change, same_status",
    [
        (COMPLETIONS, {"temperature": -1}, True),
        (COMPLETIONS, {"n": 0}, True),
        (COMPLETIONS, {"prompt": "word " * 600}, True),
        (COMPLETIONS, {"prompt": [4000]}, True),
        (COMPLETIONS, {"logprobs": 500}, True),
        (COMPLETIONS, {"model": "gpt-2"}, True),
        (CHATS, {"messages": [{"role": "user", "content": "word " * 600}]}, True),
        (CHATS, {"messages": [{"role": "user"}]}, False),
        (CHATS, {"top_logprobs": 2}, True),
        (CHATS, {"messages": []}, True),
        (CHATS, {"response_format": {"type": "xml"}}, True),
        (CHATS, {"tools": [{"type": "function"}]}, True),
        (CHATS, {"stream_options": {"include_usage": True}}, True),
        (CHATS, {"add_generation_prompt": True, "continue_final_message": True}, True),
    ],
)
def test_bad_requests_are_refused_like_vllm_s(
    server: Server, vllm_url: str, greedy: Greedy, path: str, change: dict, same_status: bool
):
    base = {"prompt": greedy.ids} if path == COMPLETIONS else {}
    body = body_of(base, greedy, path) | change
    ours, other = post(server.url, path, body), post(vllm_url, path, body)
    assert 400 <= ours.status_code < 500, ours.text
    if same_status:
        assert ours.status_code == other.status_code, other.text
