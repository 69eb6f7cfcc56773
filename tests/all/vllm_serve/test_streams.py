"""Streams of OpenAI's routes compared with vLLM's own server: same text, ids and keys."""

import functools
import json
from typing import Any

import pytest
import requests
from transformers import AutoTokenizer

from harness.servers import Server
from tests.kit.peers.vllm_serve import (
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
# Keys that only one of the two servers sends: vLLM its build's fingerprint, titopool the number of
# cached tokens and the weight versions.
OWN_KEYS = {"system_fingerprint", "prompt_tokens_details", "weight_versions"}
# Keys that stand only in the first or only in the last chunk of a choice.
FIRST_ONLY, LAST_ONLY = {"prompt_token_ids", "role"}, {"finish_reason", "stop_reason"}


def chunks_of(url: str, path: str, body: dict) -> list[dict[str, Any]]:
    """The chunks of a stream; the stream must end with `[DONE]`."""
    with requests.post(url + path, json=body | STREAMED, stream=True, timeout=120) as answer:
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = answer.content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(chunks: list[dict], path: str) -> dict[int, dict[str, Any]]:
    """The chunks of each choice joined, by index."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(
                piece["index"], {"text": "", "token_ids": [], "logprobs": [], "ends": []}
            )
            text = piece["delta"].get("content") if path == CHATS else piece["text"]
            choice["text"] += text or ""
            choice["token_ids"] += piece.get("token_ids") or []
            add_logprobs(choice["logprobs"], piece["logprobs"])
            if piece["finish_reason"]:
                choice["ends"].append((piece["finish_reason"], piece.get("stop_reason")))
    return choices


def add_logprobs(entries: list[Any], logprobs: dict[str, list] | None) -> None:
    """Adds the log-probabilities of each token, in either format."""
    if logprobs is not None:
        columns = dict(sorted(logprobs.items()))
        entries += [list(row) for row in zip(*columns.values(), strict=True)]


def keys(value: Any) -> Any:
    """The keys whose values are not null, at every depth; a list stands for its first entry."""
    if isinstance(value, dict):
        return {
            key: keys(one) if key not in ("top_logprobs", "bytes") else None
            for key, one in value.items()
            if one is not None and key not in OWN_KEYS
        }
    return [keys(value[0])] if isinstance(value, list) and value else None


def shapes(chunks: list[dict]) -> dict[str, Any]:
    """The keys of a choice's chunks taken together, and the keys of the usage chunk.

    The number of chunks may differ: a busy server sends several tokens in one chunk, so that the
    first chunk may also be the last.
    """
    own = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == 0]
    found = [keys(chunk) for chunk in own]
    for chunk in found[1:]:
        assert not names(chunk) & FIRST_ONLY
    for chunk in found[:-1]:
        assert not names(chunk) & LAST_ONLY
    return {"choice": functools.reduce(merged, found), "usage": keys(chunks[-1])}


def names(shape: Any) -> set[str]:
    """All keys of a shape, at any depth."""
    if isinstance(shape, dict):
        return shape.keys() | set().union(*map(names, shape.values()))
    return names(shape[0]) if isinstance(shape, list) else set()


def merged(one: Any, other: Any) -> Any:
    """The keys of both shapes."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys()}
        return one | other | both
    if isinstance(one, list) and isinstance(other, list):
        return [merged(one[0], other[0])]
    return other if one is None else one


def assert_same_streams(server: Server, vllm_url: str, path: str, body: dict) -> None:
    ours, expected = chunks_of(server.url, path, body), chunks_of(vllm_url, path, body)
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
def test_completion_streams_agree(server: Server, vllm_url: str, greedy: Greedy, body: Body):
    assert_same_streams(server, vllm_url, COMPLETIONS, body_of(body, greedy, COMPLETIONS))


@pytest.mark.parametrize("body", CHAT_BODIES.values(), ids=CHAT_BODIES)
def test_chat_streams_agree(server: Server, vllm_url: str, greedy: Greedy, body: Body):
    assert_same_streams(server, vllm_url, CHATS, body_of(body, greedy, CHATS))


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_invalid_utf8_at_the_end_of_a_stream_agrees(
    server: Server, vllm_url: str, tiny_model: str, path: str
):
    body = invalid_utf8(AutoTokenizer.from_pretrained(tiny_model), path)
    assert_same_streams(server, vllm_url, path, body)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_usage_in_every_chunk_agrees(server: Server, vllm_url: str, greedy: Greedy, path: str):
    base = {"prompt": greedy.ids} if path == COMPLETIONS else {}
    body = body_of(base, greedy, path)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"stream": True, "stream_options": options}
    usages = []
    for url in (server.url, vllm_url):
        answer = requests.post(url + path, json=body, timeout=120)
        events = answer.content.decode().split("\n\n")[:-2]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        counts = [tuple(chunk["usage"][key] for key in USAGE) for chunk in chunks]
        # The two servers may group tokens into chunks differently.
        usages.append((counts[0][0], sorted(counts) == counts, counts[-1]))
    assert usages[0] == usages[1]
