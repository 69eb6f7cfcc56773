"""Errors give the location of the prompt in the client's body, on every route."""

from typing import Any

import numpy as np
import pytest

from app.inputs.images import PromptImages, check_placeholders
from app.pool.request import Request
from harness.servers import Server
from harness.stub_worker import Fault
from tests.kit.peers.openai_calls import HELLO
from titopool.errors import ImageMismatch
from titopool.wire.messages import Image, ImageFacts, Job

GRAMMAR = {"structured_outputs": {"grammar": "root ::="}}


def message_of(server: Server, path: str, body: dict[str, Any], status: int) -> str:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def scored(*sequences: list[int]) -> dict[str, Any]:
    lengths = [1] * len(sequences)
    return {"sequences": sequences, "prompt_lengths": lengths, "top_logprobs": 1}


@pytest.mark.parametrize(
    "path, body, place",
    [
        ("/generate/", {"prompts": [[1], [Fault.FAIL]]}, "prompts[1]"),
        ("/v1/completions", {"prompt": [Fault.FAIL]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [Fault.FAIL]]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [Fault.FAIL], "stream": True}, "prompt"),
        ("/v1/chat/completions/tokens", {"messages": [], "tokens": [Fault.FAIL]}, "tokens"),
        ("/get_sequence_logprobs/", scored([1, 2], [Fault.FAIL, 2]), "sequences["),
    ],
)
def test_a_failure_in_the_worker_names_the_location(start_stub, stub_server, path, body, place):
    start_stub(0)
    assert message_of(stub_server(1), path, body, 500).startswith(place)


@pytest.mark.parametrize(
    "path, body, place",
    [
        ("/chat/", {"messages": [HELLO], "generation_kwargs": GRAMMAR}, "messages[0]: "),
        ("/v1/chat/completions", {"messages": HELLO, **GRAMMAR}, "messages: "),
        ("/v1/completions", {"prompt": "Hello", **GRAMMAR}, "prompt: "),
        ("/v1/completions", {"prompt": ["Hello"], "stream": True, **GRAMMAR}, "prompt[0]: "),
    ],
)
def test_a_refusal_of_the_engine_names_the_location(server: Server, path, body, place):
    assert message_of(server, path, body, 400).startswith(place)


def test_a_prompt_that_killed_two_workers_names_the_location(start_stub, stub_server):
    for index in range(2):
        start_stub(index)
    body = {"prompt": [[Fault.DIE, 1]]}
    message = message_of(stub_server(2), "/v1/completions", body, 500)
    assert message.startswith("prompt[0]: 2 workers died")


def test_a_stream_whose_worker_dies_names_the_location(start_stub, stub_server):
    start_stub(0)
    body = {"prompt": [1, 2, Fault.DIE_MID_STREAM, 4], "stream": True}
    answer = stub_server(1).post("/v1/completions", body)
    assert '"message":"prompt: its worker was lost during the stream' in answer.text


def test_missing_prompt_logprobs_name_the_location(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1)
    for form in ("json", "binary"):
        body = scored([Fault.UNSCORED, 2], [3, 4, 5]) | {"response_format": form}
        message = message_of(server, "/get_sequence_logprobs/", body, 500)
        assert message.startswith("sequences[0]: expected 2 log-probabilities of the prompt, got 0")


@pytest.mark.parametrize(
    "ids, num_images, text",
    [([1, 9], 0, "expected no placeholders"), ([1, 2], 1, "expected a placeholder")],
)
def test_mismatched_placeholders_name_the_location(ids, num_images, text):
    facts = ImageFacts(max_images=1, placeholder_ids=[9], has_placeholders=True)
    images = PromptImages([Image(b"", b"")] * num_images)
    with pytest.raises(ImageMismatch) as caught:
        check_placeholders([np.int32(ids)], [images], ["messages[3]"], facts)
    assert caught.value.message.startswith(f"messages[3]: {text}")


def test_locations_default_to_prompts():
    job = Job(1, 1, b"", 1, 1, b"")
    assert [Request([job, job]).locations[index] for index in (0, 1)] == [
        "prompts[0]",
        "prompts[1]",
    ]
    assert Request([job], ["tokens"]).locations[0] == "tokens"
