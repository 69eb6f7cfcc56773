"""OpenAI's routes beside vLLM's own server: the same bodies, the same text, ids and numbers."""

import pytest
from transformers import AutoTokenizer

from tests.servers import Server
from tests.vllm_serve import (
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


def assert_same_answers(server: Server, theirs: str, path: str, body: dict) -> None:
    our_answer, their_answer = post(server.url, path, body), post(theirs, path, body)
    assert their_answer.status_code == 200, their_answer.text
    assert our_answer.status_code == 200, our_answer.text
    ours, expected = our_answer.json(), their_answer.json()
    assert len(ours["choices"]) == len(expected["choices"])
    for mine, other in zip(ours["choices"], expected["choices"], strict=True):
        assert_same(seen(mine, path), seen(other, path), f"choices[{mine['index']}]")
    assert ours.get("prompt_token_ids") == expected.get("prompt_token_ids")
    assert_same(ours.get("prompt_logprobs"), expected.get("prompt_logprobs"), "prompt_logprobs")
    assert ours["object"] == expected["object"]
    assert {key: ours["usage"][key] for key in USAGE} == {
        key: expected["usage"][key] for key in USAGE
    }


def seen(choice: dict, path: str) -> dict:
    """What a client reads of a choice; what was not asked for may be null or missing."""
    keys = ("index", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids",
            "prompt_logprobs")  # fmt: skip
    text = choice["message"]["content"] if path == CHATS else choice["text"]
    return {"text": text, **{key: choice.get(key) for key in keys}}


@pytest.mark.parametrize("body", COMPLETION_BODIES.values(), ids=COMPLETION_BODIES)
def test_completions(server: Server, theirs: str, said: Greedy, body: Body):
    assert_same_answers(server, theirs, COMPLETIONS, body_of(body, said, COMPLETIONS))


@pytest.mark.parametrize("body", CHAT_BODIES.values(), ids=CHAT_BODIES)
def test_chat_completions(server: Server, theirs: str, said: Greedy, body: Body):
    assert_same_answers(server, theirs, CHATS, body_of(body, said, CHATS))


@pytest.mark.parametrize("path, body", WHOLE_BODIES.values(), ids=WHOLE_BODIES)
def test_whole_answers_only(server: Server, theirs: str, said: Greedy, path: str, body: dict):
    assert_same_answers(server, theirs, path, body_of(body, said, path))


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_invalid_utf8_at_the_end(server: Server, theirs: str, tiny_model: str, path: str):
    body = invalid_utf8(AutoTokenizer.from_pretrained(tiny_model), path)
    assert_same_answers(server, theirs, path, body)


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
def test_tokenize(server: Server, theirs: str, body: dict):
    ours, expected = post(server.url, "/tokenize", body), post(theirs, "/tokenize", body)
    assert expected.status_code == 200, expected.text
    assert ours.json() == expected.json()


@pytest.mark.parametrize("tokens", [[42, 1, 1393, 2, 0], [300, 301, 302], [230, 159], []])
def test_detokenize(server: Server, theirs: str, tokens: list[int]):
    ours = post(server.url, "/detokenize", {"tokens": tokens})
    assert ours.json() == post(theirs, "/detokenize", {"tokens": tokens}).json()


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
def test_refusals(
    server: Server, theirs: str, said: Greedy, path: str, change: dict, same_status: bool
):
    base = {"prompt": said.ids} if path == COMPLETIONS else {}
    body = body_of(base, said, path) | change
    ours, other = post(server.url, path, body), post(theirs, path, body)
    assert 400 <= ours.status_code < 500, ours.text
    if same_status:
        assert ours.status_code == other.status_code, other.text
