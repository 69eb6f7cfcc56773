"""Anthropic's Messages and OpenAI's Responses compared with vLLM's own routes: the same bodies."""

import pytest

from harness.servers import Server
from tests.kit.peers.vllm_serve import post

USER = {"role": "user", "content": "Hello, ü!"}
MESSAGES = {
    "plain": {"messages": [USER]},
    "system": {"system": "Be brief.", "messages": [USER]},
    "turns": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": "Hi."},
            USER,
        ]
    },
    "system blocks": {"system": [{"type": "text", "text": "Be brief."}], "messages": [USER]},
}
RESPONSES = {
    "text": {"input": "Hello, ü!"},
    "instructions": {"instructions": "Be brief.", "input": [USER]},
    "parts": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello, ü!"}]}]
    },
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_agree(server: Server, vllm_url: str, tiny_model: str, case: str):
    body = {"model": tiny_model, "max_tokens": 8, "temperature": 0, **MESSAGES[case]}
    ours, theirs = (post(url, "/v1/messages", body).json() for url in (server.url, vllm_url))
    for name in ("type", "role", "stop_reason", "stop_sequence"):
        assert ours[name] == theirs.get(name)
    assert [one["text"] for one in ours["content"]] == [one["text"] for one in theirs["content"]]
    assert ours["usage"]["output_tokens"] == theirs["usage"]["output_tokens"]
    # vLLM does not say by default what it had in its cache.
    read = ours["usage"]["cache_read_input_tokens"]
    assert ours["usage"]["input_tokens"] + read == theirs["usage"]["input_tokens"]


@pytest.mark.parametrize("case", RESPONSES)
def test_responses_agree(server: Server, vllm_url: str, tiny_model: str, case: str):
    body = {"model": tiny_model, "max_output_tokens": 8, "temperature": 0, **RESPONSES[case]}
    ours, theirs = (post(url, "/v1/responses", body).json() for url in (server.url, vllm_url))
    assert (ours["object"], ours["status"]) == (theirs["object"], theirs["status"])
    texts = [
        [part["text"] for item in one["output"] for part in item["content"]]
        for one in (ours, theirs)
    ]
    assert texts[0] == texts[1]
    for name in ("input_tokens", "output_tokens"):
        assert ours["usage"][name] == theirs["usage"][name]
