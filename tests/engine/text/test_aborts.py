"""Aborts during prefills of many steps, over real vLLM.

A request that scores a prompt retries until the whole prompt is scored. A request that generates
returns the tokens that it has.
"""

import asyncio
import base64
import concurrent.futures
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import requests

from harness.servers import KV_CACHE, Server, running_server, wait_until
from tests.kit.models import reference
from tests.kit.models.weights import TOLERANCE
from tests.kit.peers.openai_calls import HELLO
from titopool.errors import DeadlinePassed
from workers.engine.scoring import NotScored, until_scored

BINARY = {"Accept": "application/msgpack"}
# Tokens per engine step: prefilling a prompt takes 75 steps.
STEP = 16
LENGTH = 1200
PROMPTS = [[(7 * position + 13 * index) % 2048 for position in range(LENGTH)] for index in range(5)]
# Their prefills take far longer than the calls of an update, on a busy machine too.
AHEAD = [[(5 * position + 13 * index) % 2048 for position in range(LENGTH)] for index in range(12)]
# Tokens from this position on are scored.
SCORED_FROM = LENGTH - 40
OPTIONS = (
    *KV_CACHE, "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", str(STEP),
    "--max-num-batched-tokens", str(STEP), "--heartbeat-interval-s", "0.1",
)  # fmt: skip


class Models(NamedTuple):
    """A server that starts with the weights in `old`, and the folder of other weights, `new`."""

    server: Server
    old: str
    new: str

    def update(self, folder: str, policy: str = "abort", cache: str = "clear") -> int:
        """Loads the weights in `folder`; returns their version."""
        body = {"path": folder, "policy": policy, "cache": cache}
        answer = self.server.post("/update_weights", body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["version"])

    def num_sequences(self) -> float:
        return sum(self.server.metrics("sequences").values())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    from titopool.demo_model import make_model

    root = tmp_path_factory.mktemp("aborts")
    for seed, name in enumerate(("old", "new")):
        (root / name).mkdir()
        make_model(root / name, seed=seed)
    old, new = str(root / "old"), str(root / "new")
    options = ("--num-workers", "1", "--num-front-ends", "1", "--weights-root", str(root))
    with running_server(old, *options, *OPTIONS, log=root / "log") as server:
        # The tokenizer takes seconds to load.
        assert server.post("/tokenize", {"prompt": "Hello"}).status_code == 200
        yield Models(server, old, new)


@pytest.fixture(autouse=True)
def old_weights(request: pytest.FixtureRequest) -> None:
    """Each test begins with the old weights and no request in flight."""
    if "models" in request.fixturenames:
        models: Models = request.getfixturevalue("models")
        wait_until(lambda: models.num_sequences() == 0, 30)
        models.update(models.old)


StartRequest = Callable[..., Future[requests.Response]]


@pytest.fixture
def start_request(models: Models) -> Iterator[StartRequest]:
    """`start_request(path, body)`: the future response of a request that the engine has begun."""
    with ThreadPoolExecutor() as threads:

        def start(path: str, body: dict[str, Any], **options: Any) -> Future[requests.Response]:
            num_before = models.num_sequences()
            pending = threads.submit(models.server.post, path, body, **options)
            wait_until(lambda: models.num_sequences() > num_before, 30)
            assert not pending.done()
            return pending

        yield start


@pytest.fixture
def start_queued_request(models: Models, start_request: StartRequest) -> StartRequest:
    """`start_request` with other prefills ahead, which take 900 steps unless they are aborted."""

    def start(path: str, body: dict[str, Any], **options: Any) -> Future[requests.Response]:
        # None of the prefills ends before both requests are seen.
        assert models.server.post("/pause", {"mode": "keep", "lease_s": 120}).status_code == 200
        start_request("/generate/", {"prompts": AHEAD, "max_tokens": 1})
        pending = start_request(path, body, **options)
        assert models.server.post("/resume", {}).json()["was_paused"]
        return pending

    return start


def expected_logprobs(folder: str, prompt: list[int], first: int) -> list[float]:
    """Reference log-probabilities of the tokens of `prompt` from position `first` on."""
    rows = reference.logprobs(folder, prompt[:first], prompt[first:])
    return rows[range(len(rows)), prompt[first:]].tolist()


def actual_logprobs(answer: dict[str, Any]) -> list[list[float]]:
    """The scored tokens' log-probabilities, from either form of /get_sequence_logprobs/."""
    if "shape" in answer:
        values = np.frombuffer(base64.b64decode(answer["actual_logprobs_b64"]), np.float32)
        return values.reshape(answer["shape"][0], -1).tolist()
    return [
        [values[ids.index(token_id)] for values, ids, token_id in zip(*rows, prompt[SCORED_FROM:], strict=True)]
        for *rows, prompt in zip(
            answer["logprobs"], answer["logprob_token_ids"], PROMPTS, strict=True
        )
    ]  # fmt: skip


def scoring_body(form: str) -> dict[str, Any]:
    return {
        "sequences": PROMPTS, "prompt_lengths": [SCORED_FROM] * len(PROMPTS), "top_logprobs": 2,
        "response_format": form,
    }  # fmt: skip


# ---- scored again --------------------------------------------------------------------


@pytest.mark.parametrize(
    "form, policy, cache",
    [
        ("binary", "abort", "clear"),
        pytest.param("json", "abort", "clear", marks=pytest.mark.variant),
        ("binary", "keep", "clear"), ("binary", "keep", "keep"),
    ],
)  # fmt: skip
def test_sequences_interrupted_by_an_update_are_scored_with_the_new_weights(
    models, start_request, form, policy, cache
):
    pending = start_request("/get_sequence_logprobs/", scoring_body(form))
    models.update(models.new, policy, cache)
    answer = pending.result()
    assert answer.status_code == 200, answer.text
    scored = actual_logprobs(answer.json())
    for prompt, actual in zip(PROMPTS, scored, strict=True):
        # The first sequences may have been scored before the update.
        expected = [expected_logprobs(one, prompt, SCORED_FROM) for one in (models.old, models.new)]
        assert actual in [pytest.approx(one, abs=TOLERANCE) for one in expected]
    assert scored[-1] == pytest.approx(expected[-1], abs=TOLERANCE)


def test_sequences_aborted_by_a_pause_are_scored_after_the_resume(models, start_request):
    pending = start_request("/get_sequence_logprobs/", scoring_body("binary"))
    server = models.server
    assert server.post("/pause", {"mode": "abort", "lease_s": 60}).status_code == 200
    # The second pause finds no sequence running: scoring waits for the resume.
    assert server.post("/pause", {"mode": "keep", "lease_s": 60}).status_code == 200
    with pytest.raises(concurrent.futures.TimeoutError):
        pending.result(1)
    assert server.post("/resume", {}).json()["was_paused"]
    for prompt, actual in zip(PROMPTS, actual_logprobs(pending.result().json()), strict=True):
        expected = expected_logprobs(models.old, prompt, SCORED_FROM)
        assert actual == pytest.approx(expected, abs=TOLERANCE)


def test_scoring_is_not_retried_after_the_client_disconnects(models, start_request):
    pending = start_request("/get_sequence_logprobs/", scoring_body("json"))
    connection = requests.Session()
    models.server.post("/pause", {"mode": "abort", "lease_s": 60})
    body = scoring_body("json")
    with pytest.raises(requests.ReadTimeout):
        connection.post(models.server.url + "/get_sequence_logprobs/", json=body, timeout=1)
    connection.close()
    # The other request's first sequences may have been scored before the pause.
    wait_until(lambda: models.num_sequences() <= len(PROMPTS), 10)
    models.server.post("/resume", {})
    assert pending.result().status_code == 200


CHAT = {"messages": HELLO, "tokens": PROMPTS[0], "max_tokens": 4}
COMPLETIONS = {"prompt": PROMPTS[0], "max_tokens": 4, "n": 3}


@pytest.mark.parametrize(
    "path, body",
    [("/v1/completions", COMPLETIONS), ("/v1/chat/completions/tokens", CHAT)],
    ids=["completions", "chat"],
)
def test_openai_routes_score_an_aborted_prompt_again(models, start_queued_request, path, body):
    fields = {"prompt_logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    pending = start_queued_request(path, {**body, **fields})
    version = models.update(models.new)
    reply = pending.result()
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 4
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [[version, 0]]
    rows = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    actual = [row[str(one)]["logprob"] for row, one in zip(rows[1:], PROMPTS[0][1:], strict=True)]
    assert actual == pytest.approx(expected_logprobs(models.new, PROMPTS[0], 1), abs=TOLERANCE)


def test_an_aborted_completion_keeps_its_prompt_logprobs(models, start_request):
    prompt = PROMPTS[0][:STEP]
    body = {
        "prompt": prompt, "max_tokens": 1900, "prompt_logprobs": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    pending = start_request("/v1/completions", body)
    # This prefill runs after the first prompt's, so the first prompt is scored when it ends.
    models.server.generate([[1]], max_tokens=2)
    models.update(models.new)
    (choice,) = pending.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 1900
    rows = choice["prompt_logprobs"][1:]
    actual = [row[str(one)]["logprob"] for row, one in zip(rows, prompt[1:], strict=True)]
    assert actual == pytest.approx(expected_logprobs(models.old, prompt, 1), abs=TOLERANCE)


# ---- nothing generated yet -----------------------------------------------------------


@pytest.mark.parametrize("logprobs", [0, 3, None])
@pytest.mark.parametrize("path", ["/generate/", "/chat/"])
def test_completions_aborted_before_the_first_token_are_empty(
    models, start_queued_request, path, logprobs
):
    body: dict[str, Any] = {"prompts": PROMPTS[:1]}
    if path == "/chat/":
        body = {"messages": [HELLO]}
    body |= {"n": 2, "max_tokens": 100, "logprobs": logprobs}
    for headers in ({}, BINARY):
        pending = start_queued_request(path, body, headers=headers)
        version = models.update(models.new)
        reply = pending.result()
        assert reply.status_code == 200, reply.text
        answer = msgspec.msgpack.decode(reply.content) if headers else reply.json()
        assert answer["finish_reasons"] == ["abort", "abort"]
        assert [len(ids) for ids in answer["completion_ids"]] == [0, 0]
        assert answer["num_cached_tokens"] == [0]
        assert answer["weight_versions"] == [[[version - 1, 0]]] * 2
        values = answer["logprobs"]
        assert values is None if logprobs is None else [len(one) for one in values] == [0, 0]


@pytest.mark.parametrize(
    "path, body",
    [("/v1/completions", COMPLETIONS), ("/v1/chat/completions/tokens", CHAT)],
    ids=["completions", "chat"],
)
def test_a_stream_aborted_before_the_first_token_ends_with_abort(
    models, start_queued_request, path, body
):
    fields = {"stream": True, "return_token_ids": True, "logprobs": 2, "n": 3}
    if path != "/v1/completions":
        fields |= {"logprobs": True, "top_logprobs": 2}
    pending = start_queued_request(path, {**body, **fields})
    version = models.update(models.new)
    events = pending.result().text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [
        choice
        for event in events[:-2]
        for choice in json.loads(event.removeprefix("data: "))["choices"]
        if "role" not in choice.get("delta", {})
    ]
    assert sorted(choice["index"] for choice in choices) == [0, 1, 2]
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 3
    assert [choice["token_ids"] for choice in choices] == [[]] * 3
    assert [choice["weight_versions"] for choice in choices] == [[[version - 1, 0]]] * 3


# ---- bounds --------------------------------------------------------------------------


def test_a_prompt_aborted_repeatedly_fails_at_the_deadline():
    calls: list[int] = []

    async def run() -> None:
        calls.append(0)
        raise NotScored

    with pytest.raises(DeadlinePassed, match="request_timeout_s"):
        asyncio.run(until_scored(run, 0.2))
    assert len(calls) > 1
