"""Texts of single tokens: a character spread over several tokens is shown at its last token."""

import json
import socket
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from transformers import AutoTokenizer

from app.call.token_texts import MAX_BEFORE, TextLookup, decode_alone, decode_in_context
from harness.servers import wait_until
from titopool.demo_model import make_tokenizer

# Of a request, in seconds.
TIMEOUT_S = 3.0


@pytest.mark.parametrize("text", ["é\U0001f99c…\u0436a", "Hello, \U0001f99c!", "no such letters"])
def test_token_texts_join_to_the_whole_text(tiny_model: str, text: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    alone = decode_alone(tokenizer, ids)
    contexts = [(tuple(ids[max(0, end - MAX_BEFORE) : end]), one) for end, one in enumerate(ids)]
    in_context = decode_in_context(tokenizer, contexts)
    shown = [
        in_context[context] if alone[context[1]].endswith("\ufffd") else alone[context[1]]
        for context in contexts
    ]
    assert "".join(shown) == text


def test_an_incomplete_character_is_shown_as_nothing(tiny_model: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    first = tokenizer("\U0001f99c", add_special_tokens=False)["input_ids"][0]
    assert decode_in_context(tokenizer, [((first, first), first)]) == {((first, first), first): ""}


def test_the_context_of_the_first_tokens_begins_with_the_sequence():
    ids = list(range(MAX_BEFORE + 5))
    lookup = TextLookup({}, ids, as_ids=False)
    for end in range(MAX_BEFORE + 1):
        assert lookup.in_context(end, 7) == (tuple(ids[:end]), 7)
    assert lookup.in_context(MAX_BEFORE + 2, 7) == (tuple(ids[2 : MAX_BEFORE + 2]), 7)


# Of the answer each prompt has 1 MiB, and texts of its own: sockets hold half of the answer.
NUM_PROMPTS, NUM_IDS = 8, 4000
PROMPTS = [[*range(start, start + 1000)] * 4 for start in range(100, 8_100, 1000)]


def test_an_answer_that_is_read_after_its_deadline_is_whole(
    start_stub, stub_server, tmp_path: Path
):
    """The texts of each choice are looked up when it is written: the request's time was over."""
    make_tokenizer(tmp_path)
    start_stub(0, "--tokenizer", str(tmp_path), "--max-model-len", str(2 * NUM_IDS + 1))
    server = stub_server(1, "--num-front-ends", "1", "--request-timeout-s", str(TIMEOUT_S))
    # Other requests have the time to load the tokenizer.
    wait_until(lambda: server.post("/tokenize", {"prompt": "a"}).status_code == 200, 30)
    address, body = urlsplit(server.url), {"prompt": PROMPTS, "max_tokens": NUM_IDS, "logprobs": 20}
    with closing(HTTPConnection(str(address.hostname), address.port, timeout=60)) as client:
        client.connect()
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.request("POST", "/v1/completions", json.dumps(body))
        answer = client.getresponse()
        assert answer.status == 200
        time.sleep(TIMEOUT_S + 0.2)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        assert len(json.loads(answer.read())["choices"]) == NUM_PROMPTS
