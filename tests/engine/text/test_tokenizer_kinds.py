"""Tokenizers of each kind: the server's ids and texts are those of the model's tokenizer."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from transformers import AutoTokenizer

from harness.servers import Server, running_server
from tests.all.matrix.row import OPTIONS
from tests.kit.models.tokenizer_kinds import KINDS, make_model

TEXTS = ["Hello ü 你好 🙂", "  two  spaces\n\n\ttab ", "prompt_token_ids: [1, 2]", "a"]
IGNORED = {"generation_kwargs": {"ignore_eos": True}}


class Served:
    """A server, and the tokenizer of its model."""

    def __init__(self, server: Server, folder: str):
        self.server = server
        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text)["input_ids"]
        return found

    def plain_ids(self, text: str) -> list[int]:
        """Without control tokens."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp(request.param)
    folder = make_model(request.param, root / "model")
    with running_server(folder, *OPTIONS, log=root / "log") as server:
        yield Served(server, folder)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_tokenizer_s_ids(served: Served, text: str):
    ids = served.ids(text)
    found = served.server.post("/tokenize", {"prompt": text})
    assert found.json()["tokens"] == ids, found.text
    answer = served.server.generate([text], max_tokens=1)
    assert answer["prompt_ids"] == [ids]


def test_ids_become_the_tokenizer_s_text(served: Served):
    ids = served.ids(TEXTS[0])
    found = served.server.post("/detokenize", {"tokens": ids}).json()
    assert found["prompt"] == served.tokenizer.decode(ids)


def test_pieces_of_a_stream_are_the_whole_text(served: Served):
    """Random tokens cut characters into bytes."""
    body = {
        "model": served.folder, "prompt": served.ids(TEXTS[0]), "max_tokens": 200, "seed": 7,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    whole = served.server.post("/v1/completions", body).json()["choices"][0]
    url = f"{served.server.url}/v1/completions"
    text, ids = "", []
    with requests.post(url, json={**body, "stream": True}, stream=True, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
                    ids += choice["token_ids"] or []
    assert (ids, text) == (whole["token_ids"], whole["text"])
    assert len(ids) == 200
    assert served.server.generate([ids], max_tokens=1)["prompt_ids"] == [ids]


WORDS = "the pool of workers, to and from the trainer"


def logprobs_of(served: Served, allowed: list[int]) -> list[tuple[str, list[str], list[int]]]:
    """By route: the text, the tokens' texts and their ids of a completion of `allowed` ids."""
    server, prompt = served.server, served.ids("hello")
    sampling = {"seed": 1, "allowed_token_ids": allowed}
    body = {**sampling, "max_tokens": 30, "return_token_ids": True}
    plain = server.post("/v1/completions", {**body, "prompt": prompt, "logprobs": 0})
    (choice,) = plain.json()["choices"]
    tokens = choice["logprobs"]["tokens"]
    offsets = [len("".join(tokens[:end])) for end in range(len(tokens))]
    assert choice["logprobs"]["text_offset"] == offsets
    shown = [(choice["text"], tokens, choice["token_ids"])]
    chat = {"messages": [], "tokens": prompt, "add_generation_prompt": False, "logprobs": True}
    answer = server.post("/v1/chat/completions/tokens", {**body, **chat})
    (choice,) = answer.json()["choices"]
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    shown.append((choice["message"]["content"], tokens, choice["token_ids"]))
    return shown


def test_tokens_of_log_probabilities_add_up_to_the_text(served: Served):
    texts = (WORDS, WORDS[::-1])
    allowed = sorted({one for text in texts for one in served.plain_ids(text)})
    for text, tokens, ids in logprobs_of(served, allowed):
        assert len(tokens) == 30
        assert "".join(tokens) == text
        found = served.server.post("/detokenize", {"tokens": ids, "return_token_texts": True})
        assert "".join(found.json()["token_texts"]) == found.json()["prompt"]
    ids = served.plain_ids(WORDS)
    body = {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True,
        "logprob_start_len": 0, "return_text_in_logprobs": True,
    }  # fmt: skip
    rows = served.server.post("/generate", body).json()["meta_info"]["input_token_logprobs"]
    # The first token has no value, and no text.
    first = served.tokenizer.decode(ids[:1])
    assert first + "".join(text for _, _, text in rows[1:]) == WORDS


def test_two_tokens_stay_two_entries(served: Served):
    """Two tokens may differ by a space, or be parts of characters."""
    vocabulary = served.tokenizer.get_vocab()
    marked = next((one for one in vocabulary if one[0] == "\u2581" and one[1:] in vocabulary), None)
    pairs = [served.plain_ids("\U0001f642")[-4:-2]]
    if marked is not None:
        pairs.append([vocabulary[marked], vocabulary[marked[1:]]])
    for pair in pairs:
        body = {
            "prompt": served.ids("hello"), "max_tokens": 3, "seed": 1, "allowed_token_ids": pair,
            "logprobs": 2,
        }  # fmt: skip
        for as_ids in (False, True):
            answer = served.server.post(
                "/v1/completions", {**body, "return_tokens_as_token_ids": as_ids}
            )
            found = answer.json()["choices"][0]["logprobs"]
            for token, value, best in zip(
                found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
            ):
                assert len(best) == 2, best
                assert best[token] == value
                assert sum(map(math.exp, best.values())) == pytest.approx(1, abs=1e-4)
