"""TRL 1.16's clients: completions from text and ids, chats, scores, and the asynchronous trainer."""

import math
from typing import Any

import pytest
from transformers import AutoTokenizer

from harness.servers import Server
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE
from tests.kit.models.weights import assert_serves, weights_client
from tests.kit.peers.trl_client import run_trl
from titopool.settings.gpus import visible_gpus

VERSION = "1.16.0"
PROMPTS = [[42, 1393, 14], [5, 6]]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "generation_kwargs": {"ignore_eos": True}}


def assert_reference(folder: str, prompt: list[int], ids: list[int], logprobs: list) -> None:
    """Greedy ids, and the sampled tokens' log-probabilities, of transformers."""
    assert ids == reference.greedy(folder, prompt, len(ids))
    expected = reference.logprobs(folder, prompt, ids)[range(len(ids)), ids].tolist()
    assert [one for (one,) in logprobs] == pytest.approx(expected, abs=TOLERANCE)


def test_completions_from_ids(single_server: Server, tiny_model: str):
    script = f"""
prompts = {PROMPTS}
answer({{
    "greedy": client.generate(prompts, **{GREEDY}),
    "n": client.generate(prompts, n=3, max_tokens=4, generation_kwargs={{"seed": 3}}),
    "again": client.generate(prompts, n=3, max_tokens=4, generation_kwargs={{"seed": 3}}),
    "none": client.generate(prompts, logprobs=None, max_tokens=4),
    "five": client.generate(prompts, logprobs=5, max_tokens=4, top_k=7, top_p=0.9, min_p=0.01),
    "regex": client.generate(prompts, max_tokens=4, structured_outputs_regex="[ab]+"),
}})
"""
    found = run_trl(VERSION, single_server.url, script)
    greedy = found["greedy"]
    assert greedy["prompt_ids"] == PROMPTS
    for prompt, ids, logprobs in zip(
        PROMPTS, greedy["completion_ids"], greedy["logprobs"], strict=True
    ):
        assert_reference(tiny_model, prompt, ids, logprobs)
    assert [[one for (one,) in entries] for entries in greedy["logprob_token_ids"]] == greedy[
        "completion_ids"
    ]
    assert len(found["n"]["completion_ids"]) == 6
    assert found["n"]["completion_ids"] == found["again"]["completion_ids"]
    assert found["n"]["prompt_ids"] == PROMPTS
    assert found["none"]["logprobs"] is None
    for ids, values, entries in zip(
        *(found["five"][key] for key in ("completion_ids", "logprobs", "logprob_token_ids")),
        strict=True,
    ):
        for sampled, row, at in zip(ids, values, entries, strict=True):
            assert sampled in at
            assert len(row) == len(at) in (5, 6)
            assert row == sorted(row, reverse=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for ids in found["regex"]["completion_ids"]:
        assert set(tokenizer.decode(ids, skip_special_tokens=True)) <= {"a", "b"}


def test_completions_from_text_and_chats(single_server: Server, tiny_model: str):
    conversation = [{"role": "user", "content": "Hello, ü!"}]
    script = f"""
answer({{
    "text": client.generate(["Hello, AI!", "Tell me a joke"], **{GREEDY}),
    "chat": client.chat([{conversation}] * 2, n=2, max_tokens=8, logprobs=2),
    "greedy": client.chat([{conversation}], **{GREEDY}),
    "kwargs": client.chat(
        [{conversation}], chat_template_kwargs={{"enable_thinking": False}}, max_tokens=4
    ),
}})
"""
    found = run_trl(VERSION, single_server.url, script)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def rendered(**options: Any) -> list[int]:
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False, **options
        )
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    for name in ("text", "greedy"):
        one = found[name]
        for prompt, ids, logprobs in zip(
            one["prompt_ids"], one["completion_ids"], one["logprobs"], strict=True
        ):
            assert_reference(tiny_model, prompt, ids, logprobs)
    assert found["text"]["prompt_ids"] == tokenizer(["Hello, AI!", "Tell me a joke"])["input_ids"]
    assert found["chat"]["prompt_ids"] == [rendered()] * 2
    assert len(found["chat"]["completion_ids"]) == 4
    for ids, entries in zip(
        found["chat"]["completion_ids"], found["chat"]["logprob_token_ids"], strict=True
    ):
        assert all(one in at for one, at in zip(ids, entries, strict=True))
    assert found["kwargs"]["prompt_ids"] == [rendered(enable_thinking=False)]


def test_scores_of_sequences(single_server: Server, tiny_model: str):
    sequences, lengths = [[42, 1393, 14, 535, 78], list(range(100, 160)), [7, 8]], [2, 30, 2]
    script = f"answer(client.get_sequence_logprobs({sequences}, {lengths}, 5, chunk_size=2))"
    found = run_trl(VERSION, single_server.url, script)
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        assert [one for (one,) in found["actual_token_ids"][index]] == sequence[length:]
        if length == len(sequence):
            continue
        rows = reference.logprobs(tiny_model, sequence[:length], sequence[length:])
        for row, own, values, ids, actual in zip(
            rows, sequence[length:],
            *(found[key][index] for key in ("logprobs", "logprob_token_ids", "actual_logprobs")),
            strict=True,
        ):  # fmt: skip
            kept = [one for one in values if one > -math.inf]
            assert kept == pytest.approx(row[ids[: len(kept)]].tolist(), abs=TOLERANCE)
            assert actual == pytest.approx([row[own].item()], abs=TOLERANCE)


def test_the_asynchronous_trainer_s_client_and_turns(single_server: Server, tiny_model: str):
    script = f"""
import asyncio
from accelerate import PartialState
from trl.experimental.async_grpo import async_rollout_worker, vllm_client

PartialState()
server = vllm_client.VLLMClient(sys.argv[1])
server.wait_for_server_ready()

async def turns():
    import aiohttp

    # The loop's constructor starts a trainer's queues; its turns read only these settings.
    loop = object.__new__(async_rollout_worker._AsyncRolloutLoop)
    vars(loop).update(
        lora_name=None, model_name=client.model, vllm_server_url=sys.argv[1], max_tokens=6, temperature=1.0,
        top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, request_timeout=60, _counters={{}},
    )
    async with aiohttp.ClientSession() as loop.session:
        return await asyncio.gather(*map(loop._generate_one_turn, {PROMPTS} * 2))

info = server.get_server_info()
server.pause()
server.resume()
answer({{
    "dtype": server.get_dtype(), "max_model_len": server.get_max_model_len(),
    "world_size": server.get_world_size(), "transfer": info["weight_transfer_config"],
    "turns": asyncio.run(turns()),
}})
"""
    found = run_trl(VERSION, single_server.url, script)
    assert (found["dtype"], found["max_model_len"]) == ("torch.float32", 1024)
    assert found["world_size"] == 1
    assert found["transfer"] is not None
    assert len(found["turns"]) == 4
    for prompt, (ids, logprobs) in zip(PROMPTS * 2, found["turns"], strict=True):
        assert 1 <= len(ids) <= 6
        expected = reference.logprobs(tiny_model, prompt, ids)[range(len(ids)), ids].tolist()
        assert logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.skipif(bool(visible_gpus()), reason="gloo stands in for NCCL on CPUs only")
def test_the_asynchronous_trainer_s_weights(
    single_server: Server, tiny_model: str, other_model: str
):
    """Two updates by its own client, with the pauses around them that its trainer makes."""
    script = f"""
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import vllm_client, weight_transfer
from tests.kit.trainers.trl_trainer import replace_nccl_of_async_trainer

PartialState()
replace_nccl_of_async_trainer()
model = AutoModelForCausalLM.from_pretrained({other_model!r}, dtype=torch.float32)
named = list(model.named_parameters())
info = {{
    "names": [name for name, _ in named],
    "dtype_names": [str(one.dtype).removeprefix("torch.") for _, one in named],
    "shapes": [list(one.shape) for _, one in named],
}}
transfer = weight_transfer.WeightTransferClient(vllm_client.VLLMClient(sys.argv[1]), info, 60)
transfer.init_weight_transfer()
for _ in range(2):
    transfer.pause()
    transfer.send_weights((name, one.detach()) for name, one in named)
    transfer.resume()
transfer.destroy()
answer(client.generate({PROMPTS}, **{GREEDY}))
"""
    try:
        found = run_trl(VERSION, single_server.url, script)
        assert_serves(single_server, other_model)
    finally:
        client = weights_client(single_server)
        client.update_from_folder(tiny_model, version=0, policy="abort")
        client.close()
    for prompt, ids, logprobs in zip(
        PROMPTS, found["completion_ids"], found["logprobs"], strict=True
    ):
        assert_reference(other_model, prompt, ids, logprobs)
