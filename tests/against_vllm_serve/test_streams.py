"""Streams of OpenAI's routes beside those of vLLM's own server: the same text, ids and keys."""

import functools
import json
from typing import Any

import pytest
import requests
from transformers import AutoTokenizer

from tests.servers import Server
from tests.vllm_serve import (
    CHAT_BODIES,
    CHATS,
    COMPLETION_BODIES,
    COMPLETIONS,
    Body,
    Greedy,
    assert_same,
    body_of,
    invalid_utf8,
)

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
# Which of the two sends more keys: vLLM's fingerprint of its build, our count of cached tokens and
# the weights that made them.
OWN_KEYS = {"system_fingerprint", "prompt_tokens_details", "weight_versions"}
# What only the first or only the last chunk of a choice tells.
OF_FIRST, OF_LAST = {"prompt_token_ids", "role"}, {"finish_reason", "stop_reason"}


def chunks_of(url: str, path: str, body: dict) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    with requests.post(url + path, json=body | STREAMED, stream=True, timeout=120) as answer:
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = answer.content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(chunks: list[dict], path: str) -> dict[int, dict[str, Any]]:
    """What the chunks of each choice say together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"text": "", "token_ids": [], "logprobs": [], "ends": []}
            )
            said = part["delta"].get("content") if path == CHATS else part["text"]
            choice["text"] += said or ""
            choice["token_ids"] += part.get("token_ids") or []
            add_logprobs(choice["logprobs"], part["logprobs"])
            if part["finish_reason"]:
                choice["ends"].append((part["finish_reason"], part.get("stop_reason")))
    return choices


def add_logprobs(entries: list[Any], logprobs: dict[str, list] | None) -> None:
    """Adds those of each token, of either shape."""
    if logprobs is not None:
        columns = dict(sorted(logprobs.items()))
        entries += [list(row) for row in zip(*columns.values(), strict=True)]


def keys(value: Any) -> Any:
    """The keys whose values are not null, all the way down; lists by their first entry."""
    if isinstance(value, dict):
        return {
            key: keys(one) if key not in ("top_logprobs", "bytes") else None
            for key, one in value.items()
            if one is not None and key not in OWN_KEYS
        }
    return [keys(value[0])] if isinstance(value, list) and value else None


def shapes(chunks: list[dict]) -> dict[str, Any]:
    """The keys of the chunks of a choice together, and those of the usage's chunk.

    How many chunks there are is each server's affair: a busy one sends several tokens in one, and so
    the first may be the last.
    """
    own = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == 0]
    found = [keys(chunk) for chunk in own]
    for chunk in found[1:]:
        assert not names(chunk) & OF_FIRST
    for chunk in found[:-1]:
        assert not names(chunk) & OF_LAST
    return {"choice": functools.reduce(united, found), "usage": keys(chunks[-1])}


def names(shape: Any) -> set[str]:
    """All keys in it, at any depth."""
    if isinstance(shape, dict):
        return shape.keys() | set().union(*map(names, shape.values()))
    return names(shape[0]) if isinstance(shape, list) else set()


def united(one: Any, other: Any) -> Any:
    """The keys of both."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: united(one[key], other[key]) for key in one.keys() & other.keys()}
        return one | other | both
    if isinstance(one, list) and isinstance(other, list):
        return [united(one[0], other[0])]
    return other if one is None else one


def assert_same_streams(server: Server, theirs: str, path: str, body: dict) -> None:
    ours, expected = chunks_of(server.url, path, body), chunks_of(theirs, path, body)
    mine, others = joined(ours, path), joined(expected, path)
    assert mine.keys() == others.keys()
    for index, choice in mine.items():
        assert_same(choice, others[index], f"choices[{index}]")
        assert len(choice["ends"]) == 1
    assert {one["id"] for one in ours} == {ours[0]["id"]}
    assert [one["usage"] is not None for one in ours if "usage" in one] == [True]
    assert {key: ours[-1]["usage"][key] for key in USAGE} == {
        key: expected[-1]["usage"][key] for key in USAGE
    }
    assert shapes(ours) == shapes(expected)


@pytest.mark.parametrize("body", COMPLETION_BODIES.values(), ids=COMPLETION_BODIES)
def test_completions(server: Server, theirs: str, said: Greedy, body: Body):
    assert_same_streams(server, theirs, COMPLETIONS, body_of(body, said, COMPLETIONS))


@pytest.mark.parametrize("body", CHAT_BODIES.values(), ids=CHAT_BODIES)
def test_chat_completions(server: Server, theirs: str, said: Greedy, body: Body):
    assert_same_streams(server, theirs, CHATS, body_of(body, said, CHATS))


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_invalid_utf8_at_the_end(server: Server, theirs: str, tiny_model: str, path: str):
    body = invalid_utf8(AutoTokenizer.from_pretrained(tiny_model), path)
    assert_same_streams(server, theirs, path, body)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_usage_in_every_chunk(server: Server, theirs: str, said: Greedy, path: str):
    base = {"prompt": said.ids} if path == COMPLETIONS else {}
    body = body_of(base, said, path)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"stream": True, "stream_options": options}
    usages = []
    for url in (server.url, theirs):
        answer = requests.post(url + path, json=body, timeout=120)
        events = answer.content.decode().split("\n\n")[:-2]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        counts = [tuple(chunk["usage"][key] for key in USAGE) for chunk in chunks]
        # How many tokens come in one chunk is each server's affair.
        usages.append((counts[0][0], sorted(counts) == counts, counts[-1]))
    assert usages[0] == usages[1]
