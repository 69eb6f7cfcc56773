"""Each field of a body grows until the server refuses it: the front end's memory stays bounded."""

import re
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import requests

from harness.memory_growth import MIB, front_end, growth_of
from harness.servers import Server, forked_server, stub_worker, wait_until
from tests.all.fuzz.exploring import TIMEOUT_S
from tests.all.fuzz.hints import VOCAB_SIZE

pytestmark = pytest.mark.timeout(TIMEOUT_S)

BUDGET = 64 * MIB
# Python, the tokenizer's own memory, and what the allocator keeps.
SLACK = 96 * MIB
LARGEST = 48 * MIB
GROWTH = 8
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TURN = {"role": "user", "content": "a"}


def nested(depth: int) -> Any:
    """Lists in lists; msgspec refuses to write more levels."""
    value: Any = 1
    for _ in range(min(depth, 900)):
        value = [value]
    return value


def generate(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate/", {"prompts": [[1, 2]], "max_tokens": 1, **fields}


def options(**fields: Any) -> tuple[str, dict[str, Any]]:
    return generate(generation_kwargs=fields)


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [TURN], "max_tokens": 1, **fields}


def inference(**fields: Any) -> tuple[str, dict[str, Any]]:
    sampling = {"max_tokens": 1, **fields.pop("sampling_params", {})}
    return "/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling, **fields}


def sglang(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"sampling_params": {"max_new_tokens": 1}, **fields}


# What grows to a size: elements of a list, characters of a text, keys of an object or levels.
FIELDS: dict[str, Callable[[int], tuple[str, Any]]] = {
    "prompts: ids": lambda size: generate(prompts=[[1, 2]] * size),
    "prompts: texts": lambda size: generate(prompts=["a b"] * size),
    "prompts: objects": lambda size: generate(prompts=[{"prompt_token_ids": [1]}] * size),
    "prompts: one of ids": lambda size: generate(prompts=[[1] * size]),
    "prompts: truncated ids": lambda size: generate(prompts=[[1] * size], truncate_prompt_tokens=4),
    "prompts: one text": lambda size: generate(prompts=["a" * size]),
    "prompts: wide text": lambda size: generate(prompts=["\u20ac" * size]),
    "prompts: truncated text": lambda size: generate(
        prompts=["a" * size], truncate_prompt_tokens=4
    ),
    "n": lambda size: generate(n=size),
    "images": lambda size: generate(images=[["a" * size]]),
    "images: files": lambda size: generate(images=[["a"] * size]),
    "cache_salt": lambda size: generate(
        prompts=[{"prompt_token_ids": [1], "cache_salt": "a" * size}]
    ),
    "regex": lambda size: generate(structured_outputs_regex="a" * size),
    "stop": lambda size: options(stop=["a"] * size),
    "stop: text": lambda size: options(stop="a" * size),
    "stop_token_ids": lambda size: options(stop_token_ids=[1] * size),
    "bad_words": lambda size: options(bad_words=["a"] * size),
    "allowed_token_ids": lambda size: options(allowed_token_ids=[1] * size),
    "logit_bias": lambda size: options(logit_bias={str(key): 1.0 for key in range(size)}),
    "extra_args": lambda size: options(extra_args={"a": "b" * size}),
    "extra_args: levels": lambda size: options(extra_args={"a": nested(size)}),
    "choice": lambda size: options(structured_outputs={"choice": ["a"] * size}),
    "json": lambda size: options(structured_outputs={"json": {"enum": ["a"] * size}}),
    "lora_name": lambda size: generate(lora_name="a" * size),
    "messages": lambda size: chat(messages=[TURN] * size),
    "messages: content": lambda size: chat(messages=[{**TURN, "content": "a" * size}]),
    "messages: parts": lambda size: chat(
        messages=[{**TURN, "content": [{"type": "text", "text": "a"}] * size}]
    ),
    "conversations": lambda size: ("/chat/", {"messages": [[TURN]] * size, "max_tokens": 1}),
    "tools": lambda size: chat(tools=[TOOL] * size, tool_choice="none"),
    "chat_template_kwargs": lambda size: chat(chat_template_kwargs={"a": "b" * size}),
    "metadata": lambda size: chat(metadata={"a": "b" * size}),
    "user": lambda size: chat(user="a" * size),
    "tokens": lambda size: (
        "/v1/chat/completions/tokens",
        {"messages": [TURN], "tokens": [1] * size, "max_tokens": 1},
    ),
    "prompt": lambda size: ("/v1/completions", {"prompt": [[1]] * size, "max_tokens": 1}),
    "prompt: texts": lambda size: ("/v1/completions", {"prompt": ["a"] * size, "max_tokens": 1}),
    "prompt: ids": lambda size: ("/v1/completions", {"prompt": [1] * size, "max_tokens": 1}),
    "token_ids": lambda size: inference(token_ids=[1] * size),
    "sampling_params": lambda size: inference(sampling_params={"stop_token_ids": [1] * size}),
    "features": lambda size: inference(features={"kwargs_data": {"image": ["a" * size]}}),
    "input_ids": lambda size: sglang(input_ids=[[1]] * size),
    "input_ids: one": lambda size: sglang(input_ids=[1] * size),
    "text": lambda size: sglang(text=["a"] * size),
    "sequences": lambda size: (
        "/get_sequence_logprobs/",
        {"sequences": [[1, 2]] * size, "prompt_lengths": [1] * size, "top_logprobs": 1},
    ),
    "tokenize": lambda size: ("/tokenize", {"prompt": "a" * size}),
    "detokenize": lambda size: ("/detokenize", {"tokens": [1] * size}),
}


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One front end with a small budget, of which another request holds a part; its engine is a stub.

    A request may take more than the budget only while all others are small.
    """
    folder = tmp_path_factory.mktemp("sizes")
    endpoint = f"ipc://{folder}/worker-0"
    words = ("--tokenizer", tiny_model, "--vocab-size", str(VOCAB_SIZE), "--max-model-len", "512")
    limits = (
        "--memory-budget-bytes", str(BUDGET), "--max-completions-per-request", "4096",
        "--client-timeout-s", "900",
    )  # fmt: skip
    arguments = ("--endpoints", endpoint, "--num-front-ends", "1", *limits)
    with (
        stub_worker(endpoint, *words),
        forked_server(*arguments, log=folder / "log") as running,
    ):
        # Loads the tokenizer.
        wait_until(lambda: running.post("/tokenize", {"prompt": "Hello"}).ok, 60)
        with held_body(running):
            wait_until(lambda: memory_taken(running) > MIB, 30)
            yield running


def memory_taken(server: Server) -> float:
    (found,) = re.findall(r"^titopool_memory_taken_bytes (\S+)$", server.get("/metrics").text, re.M)
    return float(found)


def held_body(server: Server) -> socket.socket:
    """A connection with an unfinished body that takes a part of the budget."""
    address = urlsplit(server.url)
    client = socket.create_connection((address.hostname, address.port), timeout=60)
    body = b'{"prompts": [[' + b"1," * MIB
    head = f"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**28}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_grows_until_it_is_refused(server: Server, name: str) -> None:
    process, size, statuses = front_end(server), GROWTH, list[int]()
    with growth_of(process) as growth:
        while True:
            path, fields = FIELDS[name](size)
            body = msgspec.json.encode(fields)
            answer = requests.post(server.url + path, data=body, timeout=120)
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400, 404, 413, 429), answer.text[:500]
            assert server.get("/live").status_code == 200
            if answer.status_code != 200 or len(body) > LARGEST:
                break
            size *= GROWTH
    print(
        f"{name}: {size} is {statuses[-1]}, {len(body) / MIB:.1f} MiB, {growth.num_bytes / MIB:.0f} MiB more"
    )
    assert growth.num_bytes < BUDGET + SLACK, f"{name}: {growth.num_bytes / MIB:.0f} MiB"
    assert front_end(server).pid == process.pid
    assert server.generate([[1, 2]], max_tokens=1)["completion_ids"]
