"""Aborts amid prefills of many steps, over real vLLM: a prompt is scored as a whole or again,
and what generates ends with what there is."""

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

from tests import reference
from tests.servers import Server, running_server, wait_until
from tests.test_binary import BINARY
from tests.test_chat import HELLO
from tests.weights import TOLERANCE
from titopool.errors import DeadlinePassed
from workers.engine.scoring import NotScored, until_scored

# A step of the engine takes this many tokens, so that the prompts take 375 steps.
STEP = 16
LENGTH = 1200
PROMPTS = [[(7 * place + 13 * number) % 2048 for place in range(LENGTH)] for number in range(5)]
# What follows is scored.
SCORED_FROM = LENGTH - 40
OPTIONS = (
    "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", str(STEP),
    "--max-num-batched-tokens", str(STEP), "--heartbeat-interval-s", "0.1",
)  # fmt: skip


class Models(NamedTuple):
    """A server of `old`, and another model that it may load."""

    server: Server
    old: str
    new: str

    def update(self, folder: str, policy: str = "abort") -> int:
        """Lets it load a folder; returns the version."""
        answer = self.server.post("/update_weights", {"path": folder, "policy": policy})
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
    """Every test begins with the old weights and nothing under way."""
    if "models" in request.fixturenames:
        models: Models = request.getfixturevalue("models")
        wait_until(lambda: models.num_sequences() == 0, 30)
        models.update(models.old)


Ask = Callable[..., Future[requests.Response]]


@pytest.fixture
def ask(models: Models) -> Iterator[Ask]:
    """`ask(path, body)`: the answer to come to a request that the engine has."""
    with ThreadPoolExecutor() as threads:

        def begin(path: str, body: dict[str, Any], **options: Any) -> Future[requests.Response]:
            num_before = models.num_sequences()
            asked = threads.submit(models.server.post, path, body, **options)
            wait_until(lambda: models.num_sequences() > num_before, 30)
            assert not asked.done()
            return asked

        yield begin


@pytest.fixture
def ask_behind(ask: Ask) -> Ask:
    """The same behind the prefills of others, which take some hundred steps."""

    def begin(path: str, body: dict[str, Any], **options: Any) -> Future[requests.Response]:
        ask("/generate/", {"prompts": PROMPTS[1:], "max_tokens": 1})
        return ask(path, body, **options)

    return begin


def own_logprobs(folder: str, prompt: list[int], begin: int) -> list[float]:
    """What the model in `folder` gives each token of `prompt` from `begin` on."""
    rows = reference.logprobs(folder, prompt[:begin], prompt[begin:])
    return rows[range(len(rows)), prompt[begin:]].tolist()


def own_scores(answer: dict[str, Any]) -> list[list[float]]:
    """The sequences' own log-probabilities in either form of /get_sequence_logprobs/."""
    if "shape" in answer:
        values = np.frombuffer(base64.b64decode(answer["actual_logprobs_b64"]), np.float32)
        return values.reshape(answer["shape"][0], -1).tolist()
    return [
        [values[ids.index(own)] for values, ids, own in zip(*rows, prompt[SCORED_FROM:], strict=True)]
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
    "form, policy", [("binary", "abort"), ("json", "abort"), ("binary", "keep")]
)
def test_sequences_amid_an_update_are_scored_with_the_new_weights(models, ask, form, policy):
    asked = ask("/get_sequence_logprobs/", scoring_body(form))
    models.update(models.new, policy)
    answer = asked.result()
    assert answer.status_code == 200, answer.text
    scored = own_scores(answer.json())
    for prompt, own in zip(PROMPTS, scored, strict=True):
        # The first may have been done before.
        expected = [own_logprobs(one, prompt, SCORED_FROM) for one in (models.old, models.new)]
        assert own in [pytest.approx(one, abs=TOLERANCE) for one in expected]
    assert scored[-1] == pytest.approx(expected[-1], abs=TOLERANCE)


def test_sequences_wait_for_the_end_of_a_pause_that_aborted_them(models, ask):
    asked = ask("/get_sequence_logprobs/", scoring_body("binary"))
    server = models.server
    assert server.post("/pause", {"mode": "abort", "lease_s": 60}).status_code == 200
    # Again: nothing of it had begun.
    assert server.post("/pause", {"mode": "keep", "lease_s": 60}).status_code == 200
    with pytest.raises(concurrent.futures.TimeoutError):
        asked.result(1)
    assert server.post("/resume", {}).json()["was_paused"]
    for prompt, own in zip(PROMPTS, own_scores(asked.result().json()), strict=True):
        expected = own_logprobs(models.old, prompt, SCORED_FROM)
        assert own == pytest.approx(expected, abs=TOLERANCE)


def test_a_client_that_leaves_is_not_scored_for_again(models, ask):
    asked = ask("/get_sequence_logprobs/", scoring_body("json"))
    connection = requests.Session()
    models.server.post("/pause", {"mode": "abort", "lease_s": 60})
    body = scoring_body("json")
    with pytest.raises(requests.ReadTimeout):
        connection.post(models.server.url + "/get_sequence_logprobs/", json=body, timeout=1)
    connection.close()
    wait_until(lambda: models.num_sequences() == len(PROMPTS), 10)
    models.server.post("/resume", {})
    assert asked.result().status_code == 200


CHAT = {"messages": HELLO, "tokens": PROMPTS[0], "max_tokens": 4}
COMPLETIONS = {"prompt": PROMPTS[0], "max_tokens": 4, "n": 3}


@pytest.mark.parametrize(
    "path, body",
    [("/v1/completions", COMPLETIONS), ("/v1/chat/completions/tokens", CHAT)],
    ids=["completions", "chat"],
)
def test_prompt_logprobs_of_openais_routes(models, ask_behind, path, body):
    fields = {"prompt_logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    asked = ask_behind(path, {**body, **fields})
    version = models.update(models.new)
    reply = asked.result()
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 4
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [[version, 0]]
    rows = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    own = [row[str(one)]["logprob"] for row, one in zip(rows[1:], PROMPTS[0][1:], strict=True)]
    assert own == pytest.approx(own_logprobs(models.new, PROMPTS[0], 1), abs=TOLERANCE)


def test_what_was_scored_when_its_completion_was_aborted_stays(models, ask):
    prompt = PROMPTS[0][:STEP]
    body = {
        "prompt": prompt, "max_tokens": 1900, "prompt_logprobs": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    asked = ask("/v1/completions", body)
    # It begins behind the other's prompt, so that is done.
    models.server.generate([[1]], max_tokens=2)
    models.update(models.new)
    (choice,) = asked.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 1900
    rows = choice["prompt_logprobs"][1:]
    own = [row[str(one)]["logprob"] for row, one in zip(rows, prompt[1:], strict=True)]
    assert own == pytest.approx(own_logprobs(models.old, prompt, 1), abs=TOLERANCE)


# ---- nothing generated yet -----------------------------------------------------------


@pytest.mark.parametrize("logprobs", [0, 3, None])
@pytest.mark.parametrize("path", ["/generate/", "/chat/"])
def test_completions_without_a_token_are_empty(models, ask_behind, path, logprobs):
    body: dict[str, Any] = {"prompts": PROMPTS[:1]}
    if path == "/chat/":
        body = {"messages": [HELLO]}
    body |= {"n": 2, "max_tokens": 100, "logprobs": logprobs}
    for headers in ({}, BINARY):
        asked = ask_behind(path, body, headers=headers)
        version = models.update(models.new)
        reply = asked.result()
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
def test_a_stream_without_a_token_ends_with_abort(models, ask_behind, path, body):
    fields = {"stream": True, "return_token_ids": True, "logprobs": 2, "n": 3}
    if path != "/v1/completions":
        fields |= {"logprobs": True, "top_logprobs": 2}
    asked = ask_behind(path, {**body, **fields})
    version = models.update(models.new)
    events = asked.result().text.split("\n\n")
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


def test_a_prompt_that_is_aborted_again_and_again_fails_at_the_deadline():
    calls: list[int] = []

    async def run() -> None:
        calls.append(0)
        raise NotScored

    with pytest.raises(DeadlinePassed, match="request_timeout_s"):
        asyncio.run(until_scored(run, 0.2))
    assert len(calls) > 1
