"""Streams during weight updates with real vLLM: which weights made which token, exactly."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from harness.servers import Server, running_server
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models import reference
from tests.kit.models.weights import PROMPT, TOLERANCE

NUM_TOKENS = 900
# The update begins when a choice has this many tokens, and must end before the stream does.
UPDATE_AT = 20
MESSAGES = [{"role": "user", "content": "Hi"}]
FIELDS = {"return_token_ids": True, "ignore_eos": True}


class Models(NamedTuple):
    """A server that serves the model in `old`, and another model's folder."""

    server: Server
    client: openai.OpenAI
    old: str
    new: str

    def update(self, folder: str, version: int, policy: str = "keep") -> None:
        body = {"path": folder, "policy": policy, "version": version}
        answer = self.server.post("/update_weights", body)
        assert answer.status_code == 200, answer.text

    def abort(self) -> None:
        answer = self.server.post("/abort_requests", {"request_ids": []})
        assert answer.status_code == 200, answer.text

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        assert self.server.post("/pause", {"mode": "keep", "lease_s": 120}).status_code == 200
        yield
        assert self.server.post("/resume", {}).status_code == 200


@pytest.fixture(scope="module")
def models(single_server: Server, tiny_model: str, other_model: str) -> Iterator[Models]:
    client = openai.OpenAI(base_url=single_server.url + "/v1", api_key="none", max_retries=0)
    # Loading the tokenizer takes seconds, so it is loaded before.
    assert single_server.post("/tokenize", {"prompt": "Hello"}).status_code == 200
    models = Models(single_server, client, tiny_model, other_model)
    yield models
    models.update(tiny_model, version=0, policy="abort")


@pytest.fixture(scope="module")
def in_fours(
    tiny_model: str, other_model: str, weights_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Models]:
    """A server whose chunks have four tokens."""
    options = (
        *ENGINE_OPTIONS, "--max-model-len", "1024", "--num-workers", "1", "--num-front-ends", "1",
        "--stream-interval", "4", "--weights-root", str(weights_root),
    )  # fmt: skip
    log = tmp_path_factory.mktemp("in-fours") / "log"
    with running_server(tiny_model, *options, log=log) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        assert server.post("/tokenize", {"prompt": "Hello"}).status_code == 200
        yield Models(server, client, tiny_model, other_model)


class Choice:
    """The joined chunks of one choice."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        # After each chunk: the number of tokens, and the chunk's `weight_versions`.
        self.spans: list[tuple[int, list[list[int]]]] = []
        self.finish_reason: str | None = None

    def add(self, choice: Any) -> None:
        self.token_ids += choice.token_ids
        self.spans.append((len(self.token_ids), choice.weight_versions))
        self.finish_reason = choice.finish_reason
        if hasattr(choice.logprobs, "token_logprobs"):
            self.logprobs += choice.logprobs.token_logprobs
        else:
            self.logprobs += [entry.logprob for entry in choice.logprobs.content]


def completions(models: Models, **fields: Any) -> Any:
    return models.client.completions.create(
        model=models.old, prompt=PROMPT, logprobs=0, n=2, seed=5, extra_body=FIELDS,
        **{"max_tokens": NUM_TOKENS, **fields},
    )  # fmt: skip


def chat(models: Models, **fields: Any) -> Any:
    return models.client.chat.completions.create(
        model=models.old, messages=MESSAGES, logprobs=True, n=2, seed=5, extra_body=FIELDS,
        **{"max_tokens": NUM_TOKENS, **fields},
    )  # fmt: skip


def gathered(chunks: Any, on_chunk: Callable[[dict[int, Choice]], None]) -> dict[int, Choice]:
    """The choices of a stream; `on_chunk` sees them after every chunk."""
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            if getattr(choice, "token_ids", None) is None:
                # The first chunk of a chat has only the role.
                continue
            choices.setdefault(choice.index, Choice()).add(choice)
        on_chunk(choices)
    return choices


@pytest.mark.parametrize("ask", [completions, pytest.param(chat, marks=pytest.mark.variant)])
def test_every_chunk_has_the_weight_versions_of_all_tokens_so_far(models: Models, ask: Any):
    prompt = PROMPT
    if ask is chat:
        body = {"messages": MESSAGES}
        prompt = models.server.post("/tokenize", body).json()["tokens"]
    choices = updated_twice(models, ask)
    for choice in choices.values():
        check_versions(models, prompt, choice)


def test_updates_within_chunks_of_four(in_fours: Models):
    for choice in updated_twice(in_fours, completions).values():
        ends = [num_tokens for num_tokens, _ in choice.spans]
        sizes = [end - begin for begin, end in pairwise([0, *ends])]
        # The first token comes at once, and an update may end a chunk early.
        assert sizes[0] == 1
        assert max(sizes) == 4
        assert len(sizes) < NUM_TOKENS / 3
        check_versions(in_fours, PROMPT, choice)


def test_an_abort_loses_no_token_of_an_unfinished_chunk(in_fours: Models):
    in_fours.update(in_fours.old, version=1, policy="abort")
    number, pausing = [0, 0], []

    def on_chunk(choices: dict[int, Choice]) -> None:
        if not pausing and min(len(one.token_ids) for one in choices.values()) > UPDATE_AT:
            pausing.append(threading.Thread(target=in_fours.abort))
            pausing[0].start()

    def chunks() -> Iterator[Any]:
        options = {"include_usage": True}
        for chunk in completions(in_fours, stream=True, stream_options=options):
            if chunk.usage is not None:
                number[0] = chunk.usage.completion_tokens
            yield chunk

    choices = gathered(chunks(), on_chunk)
    pausing[0].join()
    assert number[0] == sum(len(one.token_ids) for one in choices.values())
    for choice in choices.values():
        assert choice.finish_reason == "abort"
        assert UPDATE_AT < len(choice.token_ids) == len(choice.logprobs) < NUM_TOKENS
        rows = reference.logprobs(in_fours.old, PROMPT, choice.token_ids)
        for index, token_id in enumerate(choice.token_ids):
            assert abs(float(rows[index][token_id]) - choice.logprobs[index]) < TOLERANCE, index


def updated_twice(models: Models, ask: Any) -> dict[int, Choice]:
    """The choices of a stream with two updates in its midst."""
    models.update(models.old, version=3, policy="abort")
    # The second update has a lower version number.
    updates = [(models.new, 8), (models.old, 7)]

    def on_chunk(choices: dict[int, Choice]) -> None:
        last = max((len(one.token_ids) for one in choices.values()), default=0)
        if updates and last > UPDATE_AT * (5 - 2 * len(updates)):
            # The choices cannot end while a slow machine loads the weights.
            with models.paused():
                models.update(*updates.pop(0))

    choices = gathered(ask(models, stream=True), on_chunk)
    assert sorted(choices) == [0, 1]
    return choices


def check_versions(models: Models, prompt: list[int], choice: Choice) -> None:
    """Each chunk and each token is of the weights that it says."""
    assert (len(choice.token_ids), choice.finish_reason) == (NUM_TOKENS, "length")
    _, spans = choice.spans[-1]
    assert [version for version, _ in spans] == [3, 8, 7]
    begins = [begin for _, begin in spans]
    assert begins[0] == 0 < UPDATE_AT <= begins[1] < begins[2] < NUM_TOKENS
    # Each chunk has the same spans for the tokens up to it.
    for num_tokens, so_far in choice.spans:
        assert so_far == [span for span in spans if span[1] < num_tokens]
    assert_weights(models, prompt, choice, begins)


def assert_weights(models: Models, prompt: list[int], choice: Choice, begins: list[int]) -> None:
    """Each token has the log-probability that its own weights give, up to and after the switch."""
    old = reference.logprobs(models.old, prompt, choice.token_ids)
    new = reference.logprobs(models.new, prompt, choice.token_ids)
    for index, token_id in enumerate(choice.token_ids):
        rows = new if begins[1] <= index < begins[2] else old
        assert abs(float(rows[index][token_id]) - choice.logprobs[index]) < TOLERANCE, index


def test_a_stream_aborted_by_an_update_has_the_old_version(models: Models):
    models.update(models.old, version=1, policy="abort")
    updating: list[threading.Thread] = []

    def on_chunk(choices: dict[int, Choice]) -> None:
        if not updating and any(len(one.token_ids) > UPDATE_AT for one in choices.values()):
            updating.append(threading.Thread(target=models.update, args=(models.new, 2, "abort")))
            updating[0].start()

    choices = gathered(completions(models, stream=True), on_chunk)
    updating[0].join()
    for choice in choices.values():
        assert choice.finish_reason == "abort"
        assert {str(spans) for _, spans in choice.spans} == {"[[1, 0]]"}


@pytest.mark.parametrize("ask", [completions, chat])
def test_the_last_chunk_has_the_versions_of_the_unstreamed_answer(models: Models, ask: Any):
    models.update(models.old, version=4, policy="abort")
    choices = gathered(ask(models, max_tokens=20, stream=True), lambda _: None)
    for choice in ask(models, max_tokens=20).choices:
        assert choice.token_ids == choices[choice.index].token_ids
        assert choice.weight_versions == choices[choice.index].spans[-1][1] == [[4, 0]]


def test_streams_without_token_ids_have_no_versions(models: Models):
    chunks = models.client.completions.create(
        model=models.old, prompt=PROMPT, max_tokens=3, stream=True
    )
    for chunk in chunks:
        assert not hasattr(chunk.choices[0], "weight_versions")
