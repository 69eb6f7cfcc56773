"""Columns of the matrix that need text only: a server with a tiny random model, against transformers.

Each column returns nothing if it is exact, and raises AssertionError if it is not.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.servers import Server, wait_until
from tests.kit.models import reference
from tests.kit.models.model_families import module_tensors
from tests.kit.models.weights import TOLERANCE, weights_client
from tests.kit.trainers.trl_weights_client import update_by_trl

# Ids of normal tokens of the small tokenizer. Random ones are no merges of a text.
IDS = range(5, 2000)
NUM_TOKENS = 12


@dataclass
class Row:
    """A running server, the folder of its model, and a folder with other weights."""

    server: Server
    own: str
    other: str


def prompts() -> list[list[int]]:
    """One shorter and two longer than the window of the models that have one."""
    made = random.Random(1)
    return [made.choices(IDS, k=size) for size in (7, 40, 100)]


def assert_close(found: list[float], expected: list[float]) -> None:
    worst = max(abs(one - two) for one, two in zip(found, expected, strict=True))
    assert worst <= TOLERANCE, f"log-probabilities differ by {worst:.4f}"


def chosen(rows: Any, ids: list[int]) -> list[float]:
    return [float(row[one]) for row, one in zip(rows, ids, strict=True)]


def flat(entries: list[list[float]]) -> list[float]:
    return [one for (one,) in entries]


def greedy_answer(
    server: Server, folder: str, asked: list[list[int]] | None = None, **fields: Any
) -> None:
    """Checks that ids and log-probabilities at temperature 0 are those of the model in `folder`.

    Args:
        asked: prompts; default: `prompts()`.
    """
    asked = asked or prompts()
    answer = server.generate(
        asked, temperature=0, max_tokens=NUM_TOKENS, logprobs=0,
        generation_kwargs={"ignore_eos": True}, **fields,
    )  # fmt: skip
    assert answer["prompt_ids"] == asked, "other prompt ids"
    for prompt, ids, values in zip(
        asked, answer["completion_ids"], answer["logprobs"], strict=True
    ):
        rows = reference.logprobs(folder, prompt, ids)
        # Where two ids are as probable as each other, either is right.
        gaps = [float(one.max() - one[token_id]) for one, token_id in zip(rows, ids, strict=True)]
        assert max(gaps) <= TOLERANCE, (
            f"other ids after {gaps.index(max(gaps))} tokens: {max(gaps):.4f} below the best"
        )
        assert_close(flat(values), chosen(rows, ids))


def column_greedy(row: Row) -> None:
    greedy_answer(row.server, row.own)


def column_sampled(row: Row) -> None:
    """At T = 0.7, n = 3: the log-probabilities are those of the sampler, and the ids differ."""
    (_, prompt, _) = prompts()
    answer = row.server.generate(
        [prompt], n=3, temperature=0.7, max_tokens=NUM_TOKENS, logprobs=0,
        generation_kwargs={"ignore_eos": True, "seed": 3},
    )  # fmt: skip
    assert len({tuple(ids) for ids in answer["completion_ids"]}) == 3
    for ids, values in zip(answer["completion_ids"], answer["logprobs"], strict=True):
        rows = reference.logprobs(row.own, prompt, ids, temperature=0.7)
        assert_close(flat(values), chosen(rows, ids))


def column_cache(row: Row) -> None:
    """A prompt that was asked before, and one that goes on from there, give the same as without."""
    # The cache has whole blocks, of up to 128 tokens on a CPU.
    prompt = random.Random(2).choices(IDS, k=300)
    found_before = num_cached(row)
    for asked in (prompt, prompt, prompt + prompts()[1]):
        greedy_answer(row.server, row.own, [asked])
    if has_prefix_cache(row.own):
        # With the worker's next heartbeat.
        wait_until(lambda: num_cached(row) > found_before, 10, lambda: "no hit in the prefix cache")


def num_cached(row: Row) -> float:
    return sum(row.server.metrics("cached_tokens_total").values())


def has_prefix_cache(folder: str) -> bool:
    """On a CPU, vLLM has none for latent attention, and titopool none for recurrent layers."""
    without = ("mamba_", "linear_key_", "kv_lora_rank")
    return not any(name.startswith(without) for name in vars(AutoConfig.from_pretrained(folder)))


def column_streams(row: Row) -> None:
    """The ids of a stream are those of a whole answer."""
    (_, prompt, _) = prompts()
    body = {
        "model": row.own, "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS,
        "ignore_eos": True, "return_token_ids": True, "stream": True,
    }  # fmt: skip
    found: list[int] = []
    url = f"{row.server.url}/v1/completions"
    with requests.post(url, json=body, stream=True, timeout=60) as reply:
        assert reply.status_code == 200, reply.text
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found += choice["token_ids"] or []
    whole = row.server.generate(
        [prompt], temperature=0, max_tokens=NUM_TOKENS, generation_kwargs={"ignore_eos": True}
    )
    assert found == whole["completion_ids"][0]


def column_scoring(row: Row) -> None:
    """The log-probabilities of given ids are transformers'."""
    sequences = prompts()
    body = {"sequences": sequences, "prompt_lengths": [1] * 3, "top_logprobs": 1}
    answer = row.server.post("/get_sequence_logprobs/", {**body, "response_format": "json"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for ids, values, named in zip(
        sequences, found["logprobs"], found["logprob_token_ids"], strict=True
    ):
        rows = reference.logprobs(row.own, ids[:1], ids[1:])
        own = [
            entries[places.index(one)]
            for entries, places, one in zip(values, named, ids[1:], strict=True)
        ]
        assert_close(own, chosen(rows, ids[1:]))


def column_update(row: Row) -> None:
    """Weights of the trainer's module there, and back from a folder, through the server."""
    with weights_client(row.server) as client:
        client.update(module_tensors(row.other), policy="keep")
    greedy_answer(row.server, row.other)
    answer = row.server.post("/update_weights", {"path": row.own, "policy": "keep"})
    assert answer.status_code == 200, answer.text
    greedy_answer(row.server, row.own)


def column_update_by_trl(row: Row) -> None:
    """One tensor a call, by TRL's own client."""
    update_by_trl(row.server.url, row.other)
    # TRL sends parameters, so buffers stay.
    expected = with_parameters(row.own, row.other)
    greedy_answer(row.server, expected)


def with_parameters(folder: str, other: str) -> str:
    """The folder of a model with the buffers of one and the parameters of another."""
    model, new = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (folder, other)
    )
    model.load_state_dict(dict(new.named_parameters()), strict=False)
    made = Path(other).parent / "parameters"
    model.save_pretrained(made)
    return str(made)


COLUMNS: dict[str, Callable[[Row], None]] = {
    "greedy": column_greedy,
    "T = 0.7, n = 3": column_sampled,
    "prefix cache": column_cache,
    "streams": column_streams,
    "scoring": column_scoring,
    "update": column_update,
    "update by TRL": column_update_by_trl,
}
TWO_RANKS: dict[str, Callable[[Row], None]] = {
    "TP 2": column_greedy,
    "TP 2, update": column_update,
}
