"""SkyRL 0.4.0's remote inference client: generation, the Tinker server's samples, control calls."""

import pytest
from transformers import AutoTokenizer

from harness.servers import Server
from tests.clients.published import run_client
from tests.clients.scripts import CLIENT
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE

PROMPTS = [[42, 1393, 14], [5, 6]]


def test_generation_from_ids(single_server: Server, tiny_model: str):
    script = f"""
async def calls(client):
    # As skyrl's configuration sets them for training.
    sampling = {{
        "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "logprobs": 1, "repetition_penalty": 1.0, "stop": None, "skip_special_tokens": True,
        "include_stop_str_in_output": True, "additional_kwargs": None,
    }}
    del sampling["additional_kwargs"]
    return await client.generate({{
        "prompt_token_ids": {PROMPTS}, "sampling_params": sampling, "session_ids": ["a", "b"],
        "cache_salt": "1",
    }})
"""
    found = run_client("skyrl", single_server.url, script + CLIENT)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = zip(
        PROMPTS,
        *(found[key] for key in ("responses", "response_ids", "response_logprobs", "stop_reasons")),
        strict=True,
    )
    for prompt, text, ids, logprobs, reason in rows:
        assert reason in ("stop", "length")
        assert text == tokenizer.decode(ids)
        expected = reference.logprobs(tiny_model, prompt, ids)[range(len(ids)), ids].tolist()
        assert logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_samples_of_the_tinker_server(single_server: Server, tiny_model: str):
    script = f"""
async def calls(client):
    return await client.sample({{"json": {{
        "prompt": {{"chunks": [{{"type": "encoded_text", "tokens": {PROMPTS[0]}}}]}},
        "num_samples": 3, "session_id": "a", "prompt_logprobs": True, "topk_prompt_logprobs": 2,
        "sampling_params": {{"max_tokens": 5, "temperature": 1.0, "seed": 7, "top_k": -1, "top_p": 1.0}},
    }}}})
"""
    found = run_client("skyrl", single_server.url, script + CLIENT)
    assert len(found["sequences"]) == 3
    for one in found["sequences"]:
        ids = one["tokens"]
        expected = reference.logprobs(tiny_model, PROMPTS[0], ids)[range(len(ids)), ids].tolist()
        assert one["logprobs"] == pytest.approx(expected, abs=TOLERANCE)
    first, *own = found["prompt_logprobs"]
    rows = reference.logprobs(tiny_model, PROMPTS[0][:1], PROMPTS[0][1:])
    assert first is None
    assert own == pytest.approx(rows[range(2), PROMPTS[0][1:]].tolist(), abs=TOLERANCE)
    for row, best in zip(rows, found["topk_prompt_logprobs"][1:], strict=True):
        assert [one for one, _ in best][:2] == row.topk(2).indices.tolist()


def test_texts_chats_and_control_calls(single_server: Server, tiny_model: str):
    script = """
async def calls(client):
    ids = await client.tokenize(["Hello, AI!"])
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "session_id": "a"}
    found = {
        "ids": ids, "texts": await client.detokenize(ids),
        "chat": await client.chat_completion({"json": chat}),
        "completion": await client.completion({"json": {"prompt": ids[0], "max_tokens": 4}}),
        "world_size": await client.get_world_size(),
    }
    await client.pause_generation()
    waiting = asyncio.create_task(
        client.generate({"prompt_token_ids": ids, "sampling_params": {"max_tokens": 3}})
    )
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done, "generated while paused"
    await client.resume_generation()
    found["after"] = (await waiting)["response_ids"]
    await client.reset_prefix_cache()
    await client.finish_session("a")
    return found
"""
    found = run_client("skyrl", single_server.url, script + CLIENT)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert found["ids"] == tokenizer(["Hello, AI!"])["input_ids"]
    assert found["texts"] == ["Hello, AI!"]
    assert found["chat"]["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= found["completion"]["usage"]["completion_tokens"] <= 4
    assert found["world_size"] == [1, 1]
    assert 1 <= len(found["after"][0]) <= 3
