"""Updates that leave requests in flight their keys and values (`cache`), with real vLLM, exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import torch

from harness.servers import Server
from tests.kit.models import reference
from tests.kit.models.weights import PROMPT, TOLERANCE, weights_client
from tests.kit.trainers.trainer import tensors_of
from titopool.client.weights_client import WeightsError

NUM_TOKENS = 300
# Tokens between updates, at least.
EVERY = 40
# More than a block of vLLM's cache on a CPU.
LONG_PROMPT = [5 + index % 200 for index in range(300)]


def update(server: Server, folder: str, version: int, cache: str, **fields: Any) -> dict[str, Any]:
    body = {"path": folder, "policy": "keep", "version": version, "cache": cache, **fields}
    answer = server.post("/update_weights", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["cache"] == cache
    return found


@pytest.fixture
def server(single_server: Server, tiny_model: str) -> Iterator[Server]:
    update(single_server, tiny_model, 0, "clear")
    yield single_server
    update(single_server, tiny_model, 0, "clear")


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """The choices cannot end while a slow machine loads the weights."""
    assert server.post("/pause", {"mode": "keep", "lease_s": 120}).status_code == 200
    yield
    assert server.post("/resume", {}).status_code == 200


def choice_through(server: Server, updates: list[tuple[str, int, str]]) -> dict[str, Any]:
    """A streamed choice during which `updates` (folder, version, cache) come, one after the other."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    found: dict[str, Any] = {"token_ids": [], "logprobs": []}
    left = list(updates)
    for chunk in client.completions.create(
        model=client.models.list().data[0].id, prompt=PROMPT, max_tokens=NUM_TOKENS, seed=5,
        logprobs=0, stream=True, extra_body={"return_token_ids": True, "ignore_eos": True},
    ):  # fmt: skip
        for choice in chunk.choices:
            sent = choice.model_extra or {}
            found["token_ids"] += sent["token_ids"]
            found["logprobs"] += choice.logprobs.token_logprobs
            found |= {name: sent.get(name) for name in ("weight_versions", "kv_from")}
        if left and len(found["token_ids"]) > EVERY * (1 + len(updates) - len(left)):
            with paused(server):
                update(server, *left.pop(0))
    assert not left
    return found


@torch.inference_mode()
def expected_logprobs(
    ids: list[int], cuts: list[tuple[int, str, str]], folder: str
) -> torch.Tensor:
    """Log-probabilities, [tokens, vocabulary], of a completion whose weights changed.

    Args:
        cuts: the first token of new weights, their folder, and what became of the cache: the last
            token before it was sampled, but had no keys and values yet.
        folder: the first weights.
    """
    whole = PROMPT + ids
    rows, keys, done = [], None, 0
    ends = [*(index for index, _, _ in cuts), len(ids)]
    for end, (_, served, cache) in zip(ends, [(0, folder, "keep"), *cuts], strict=True):
        if cache == "clear":
            keys, done = None, 0
        until = len(PROMPT) + end - 1
        model = reference.reference_model(served)
        output = model(torch.tensor([whole[done:until]]), past_key_values=keys, use_cache=True)
        wanted = end - len(rows)
        rows += list(torch.log_softmax(output.logits[0, -wanted:], dim=-1))
        keys, done = output.past_key_values, until
    return torch.stack(rows)


def assert_exact(found: dict[str, Any], rows: torch.Tensor) -> None:
    assert len(found["token_ids"]) == NUM_TOKENS
    for index, (token_id, logprob) in enumerate(
        zip(found["token_ids"], found["logprobs"], strict=True)
    ):
        assert abs(float(rows[index][token_id]) - logprob) < TOLERANCE, index


def test_a_request_keeps_its_keys_through_updates_and_says_whose_they_are(
    server: Server, tiny_model: str, other_model: str
):
    updates = [(other_model, 5, "keep"), (tiny_model, 6, "keep"), (other_model, 7, "clear")]
    found = choice_through(server, updates)
    versions, begins = zip(*found["weight_versions"], strict=True)
    assert versions == (0, 5, 6, 7)
    # After an update that clears, all is computed again.
    assert found["kv_from"] == [0, 0, 0, 7]
    cuts = [
        (begin, folder, cache)
        for begin, (folder, _, cache) in zip(begins[1:], updates, strict=True)
    ]
    assert_exact(found, expected_logprobs(found["token_ids"], cuts, tiny_model))
    # With keys of each token's own weights it would be another result: the check can fail.
    cleared = [(begin, folder, "clear") for begin, folder, _ in cuts]
    rows = expected_logprobs(found["token_ids"], cleared, tiny_model)
    with pytest.raises(AssertionError):
        assert_exact(found, rows)


def ask(server: Server, **fields: Any) -> tuple[int, list[int], list[float]]:
    """Cached tokens of `LONG_PROMPT`, and ids and log-probabilities of a completion."""
    answer = server.generate(
        [{"prompt_token_ids": LONG_PROMPT, **fields}], max_tokens=8, temperature=0
    )
    assert answer.get("kv_from") is None
    logprobs = [value for (value,) in answer["logprobs"][0]]
    return answer["num_cached_tokens"][0], answer["completion_ids"][0], logprobs


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "a"}])
def test_a_new_request_reads_no_keys_of_earlier_weights(
    server: Server, tiny_model: str, other_model: str, fields: dict[str, str]
):
    ask(server, **fields)
    num_cached, _, _ = ask(server, **fields)
    assert num_cached > 0
    # And those of the first weights are not found again when these come back.
    for version, folder in ((5, other_model), (6, tiny_model)):
        update(server, folder, version, "keep")
        num_cached, ids, logprobs = ask(server, **fields)
        assert num_cached == 0
        rows = reference.logprobs(folder, LONG_PROMPT, ids)
        for index, token_id in enumerate(ids):
            assert abs(float(rows[index][token_id]) - logprobs[index]) < TOLERANCE
        assert ask(server, **fields)[0] > 0
        # A client's salt finds nothing that is another client's.
        for number in range(8):
            for salt in (f"{number}", f"{number}:a"):
                assert ask(server, cache_salt=salt)[0] == 0


def test_caches_are_kept_where_weights_wait_elsewhere(server: Server, other_model: str):
    client = weights_client(server, timeout_s=30)
    try:
        with pytest.raises(
            WeightsError, match=r"weight_staging=kv, cache=keep.*prefer_keep or clear"
        ):
            client.update(tensors_of(other_model), policy="keep", cache="keep")
        result = client.update(tensors_of(other_model), policy="keep", cache="prefer_keep")
        assert (result["staging"], result["cache"]) == ("kv", "clear")
    finally:
        client.close()
    answer = server.post(
        "/update_weights", {"path": other_model, "policy": "keep", "cache": "some"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache")
