"""Tokenizers of each kind: the server's ids and texts are those of the model's tokenizer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from transformers import AutoTokenizer

from tests.matrix.row import OPTIONS
from tests.servers import Server, running_server
from tests.tokenizer_kinds import KINDS, make_model

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
