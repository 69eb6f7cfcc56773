"""`titopool.Client` and `AsyncClient` against real vLLM: the same as plain JSON posts, bit for bit."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from harness.servers import Server, wait_until
from titopool import AsyncClient, Client, Completion, PromptResult
from titopool.errors import InvalidRequest, PromptTooLong
from titopool.release import RELEASE

PROMPTS = [[42, 1393, 14], [7, 8, 9, 10, 11], [535, 78]]
SEEDED = {"n": 2, "max_tokens": 6, "seed": 5, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(server: Server):
    with Client(server.url, timeout_s=120) as one:
        yield one


def fields(options: dict[str, Any]) -> dict[str, Any]:
    """`options` of the client as a JSON body has them."""
    named = {"n", "max_tokens", "temperature", "logprobs", "top_k"}
    own = {name: one for name, one in options.items() if name in named}
    return own | {
        "generation_kwargs": {name: one for name, one in options.items() if name not in named}
    }


def as_json(results: list[PromptResult]) -> dict[str, Any]:
    """Results in the form of the JSON answer."""
    completions = [one for result in results for one in result.completions]
    return {
        "prompt_ids": [one.prompt_ids.tolist() for one in results],
        "completion_ids": [one.ids.tolist() for one in completions],
        "logprobs": [entries(one) for one in completions],
        "finish_reasons": [one.finish_reason for one in completions],
        "weight_versions": [[list(span) for span in one.weight_versions] for one in completions],
    }


def entries(one: Completion) -> list[list[float]]:
    assert one.logprobs is not None
    if one.top_logprobs is None:
        return [[value] for value in one.logprobs.tolist()]
    return [part.tolist() for part in one.top_logprobs]


def rounded(answer: dict[str, Any]) -> dict[str, Any]:
    values = [[[float(np.float32(one)) for one in part] for part in run]
              for run in answer["logprobs"]]  # fmt: skip
    return {name: answer[name] for name in as_json([])} | {"logprobs": values}


@pytest.mark.parametrize("logprobs", [0, 3])
@pytest.mark.parametrize(
    "prompts", [PROMPTS, ["Hello, world", "two"], [{"prompt_token_ids": [3, 4, 5]}]],
    ids=["ids", "text", "objects"],
)  # fmt: skip
def test_generate_equals_the_json_answer(server: Server, client: Client, prompts, logprobs: int):
    options = {**SEEDED, "logprobs": logprobs}
    results = client.generate(prompts, **options)
    assert as_json(results) == rounded(server.generate(prompts, **fields(options)))
    for one in (run for result in results for run in result.completions):
        assert (one.ids.dtype, one.logprobs.dtype) == (np.int32, np.float32)
        assert len(one.logprobs) == len(one.ids)
        if logprobs:
            for sampled, value, ids, values in zip(
                one.ids, one.logprobs, one.top_ids, one.top_logprobs, strict=True
            ):
                assert values[ids.tolist().index(sampled)] == value
    assert results[0].prompt_ids.dtype == np.int32


def test_one_prompt_and_no_logprobs(client: Client):
    (one,) = client.generate(np.array([3, 4, 5]), logprobs=None, max_tokens=2, temperature=0.0)
    (done,) = one.completions
    assert (one.prompt_ids.tolist(), done.logprobs, done.top_ids, done.lora_version) == (
        [3, 4, 5], None, None, None,
    )  # fmt: skip
    # Truncated prompts come back, as the engine ran them.
    (short,) = client.generate([3, 4, 5], max_tokens=1, truncate_prompt_tokens=2)
    assert short.prompt_ids.tolist() == [4, 5]


def test_chat_and_render(server: Server, client: Client):
    (result,) = client.chat(MESSAGES, tools=[TOOL], **SEEDED)
    body = {"messages": [MESSAGES], "tools": [TOOL], **fields({**SEEDED, "logprobs": 0})}
    assert as_json([result]) == rounded(server.post("/chat/", body).json())
    rendered = client.render(MESSAGES, tools=[TOOL])
    assert rendered.dtype == np.int32
    assert rendered.tolist() == result.prompt_ids.tolist()
    without = client.render(MESSAGES, add_generation_prompt=False)
    with_prompt = client.render(MESSAGES)
    assert with_prompt[: len(without)].tolist() == without.tolist()
    assert len(with_prompt) > len(without)


def test_score(server: Server, client: Client):
    scored = client.score(PROMPTS, [1, 2, 1], top_logprobs=2)
    body = {"sequences": PROMPTS, "prompt_lengths": [1, 2, 1], "top_logprobs": 2}
    plain = server.post("/get_sequence_logprobs/", body).json()
    assert [one.logprobs.shape for one in scored] == [(2,), (3,), (1,)]
    for one, ids, values, sequence, begin in zip(
        scored, plain["logprob_token_ids"], plain["logprobs"], PROMPTS, [1, 2, 1], strict=True
    ):
        for position, token in enumerate(sequence[begin:]):
            expected = dict(zip(ids[position], np.float32(values[position]), strict=True))
            assert one.logprobs[position] == expected[token]
            best = one.top_ids[position].tolist()
            assert [expected[name] for name in best] == one.top_logprobs[position].tolist()


def test_text_and_ids(client: Client, tiny_model: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = client.tokenize("Hello, world")
    assert ids.tolist() == tokenizer("Hello, world")["input_ids"]
    assert client.detokenize(ids) == "Hello, world"


def test_info_and_workers(server: Server, client: Client, tiny_model: str):
    info = client.info()
    assert (info.release, info.model, info.max_model_len, dict(info.adapters)) == (
        RELEASE, server.get("/v1/models").json()["data"][0]["id"], 512, {},
    )  # fmt: skip
    assert info.weight_version == "0"
    seen = []
    workers = client.wait_until_ready(60, seen.append, num_workers=2)
    assert [one.phase for one in workers] == ["ready", "ready"]
    assert seen == [workers]


def test_a_batch_with_progress_is_the_same(client: Client, capsys: pytest.CaptureFixture[str]):
    shown = client.generate(PROMPTS, progress=True, **SEEDED)
    assert "3/3" in capsys.readouterr().err
    assert as_json(shown) == as_json(client.generate(PROMPTS, **SEEDED))
    for progress in (False, True):
        with pytest.raises(InvalidRequest, match=r"prompts\[2\]\[1\]"):
            client.generate([[1], [2], [3, -1]], progress=progress)
    with pytest.raises(PromptTooLong):
        client.generate([1] * 600)


def test_an_abort_ends_a_request_that_a_pause_holds(server: Server, client: Client):
    results: list[PromptResult] = []

    def generate() -> None:
        results.extend(client.generate([1, 2], max_tokens=400, request_id="held", ignore_eos=True))

    thread = threading.Thread(target=generate)
    client.pause("keep", lease_s=300)
    try:
        assert server.get("/is_paused").json()["is_paused"]
        thread.start()
        wait_until(lambda: client.abort(["held"]) or not thread.is_alive(), 60)
        assert results[0].completions[0].finish_reason == "abort"
    finally:
        client.resume()
        client.abort()
        thread.join(120)
    assert not server.get("/is_paused").json()["is_paused"]


def test_the_async_client_does_the_same(server: Server, client: Client):
    async def main() -> list[list[PromptResult]]:
        async with AsyncClient(server.url, timeout_s=120) as one:
            assert (await one.tokenize("Hello")).tolist() == client.tokenize("Hello").tolist()
            assert (await one.info()) == client.info()
            assert [two.logprobs.shape for two in await one.score([[1, 2, 3]], [1])] == [(2,)]
            return list(await asyncio.gather(*(one.generate([ids], **SEEDED) for ids in PROMPTS)))

    found = [result for part in asyncio.run(main()) for result in part]
    assert as_json(found) == as_json(client.generate(PROMPTS, **SEEDED))
