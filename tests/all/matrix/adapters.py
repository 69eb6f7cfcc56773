"""The column of the matrix for LoRA adapters, against transformers with merged weights.

vLLM's kernels for adapters take no float32 on a GPU. There the server computes in bfloat16, and the
means of the differences decide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from harness.servers import Server
from tests.all.matrix.text import NUM_TOKENS, chosen, flat, greedy_answer, prompts
from tests.kit.models import reference
from titopool.demo_model import make_tokenizer
from titopool.settings.gpus import visible_gpus

# The projections of attention that families have, of which each adapter changes all it finds.
TARGETS = ("q_proj", "v_proj", "qkv_proj", "o_proj")
OPTIONS: tuple[str, ...] = ("--enable-lora", "--max-lora-rank", "8")
if visible_gpus():
    OPTIONS += ("--dtype", "bfloat16")
# Of log-probabilities, where the weights are those of the reference, and where they are not.
SAME, OTHER = 0.1, 1.0


@dataclass
class Row:
    """A running server that takes adapters, the folder of its model, and one for adapters."""

    server: Server
    own: str
    root: Path


def make_adapter(own: str, root: Path) -> tuple[str, str]:
    """Writes a random adapter, and the model with the adapter merged; returns their folders."""
    model = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32)
    ends = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=[one for one in TARGETS if one in ends],
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(root / "adapter")
    merged = root / "merged"
    merged.mkdir()
    make_tokenizer(merged)
    adapted.merge_and_unload().save_pretrained(merged)
    return str(root / "adapter"), str(merged)


def column_adapter(row: Row) -> None:
    """An adapter that is loaded while the server runs; requests without it are as before."""
    adapter, merged = make_adapter(row.own, row.root)
    body = {"lora_name": "style", "lora_path": adapter}
    answer = row.server.post("/v1/load_lora_adapter", body)
    assert answer.status_code == 200, answer.text
    check(row.server, merged, row.own, lora_name="style")
    check(row.server, row.own, merged)


def check(server: Server, folder: str, other: str, **fields: str) -> None:
    """Checks that the server has the weights of the model in `folder`, and not those in `other`."""
    if not visible_gpus():
        greedy_answer(server, folder, **fields)
        return
    answer = server.generate(
        prompts(), temperature=0, max_tokens=NUM_TOKENS, logprobs=0,
        generation_kwargs={"ignore_eos": True}, **fields,
    )  # fmt: skip
    near, far = (mean_difference(answer, one) for one in (folder, other))
    assert near < SAME, f"log-probabilities differ by {near:.4f} in the mean"
    assert far > OTHER, f"only {far:.4f} from other weights, in the mean"


def mean_difference(answer: dict[str, Any], folder: str) -> float:
    """Between an answer's log-probabilities and those of the model in `folder`, in float32."""
    differences: list[float] = []
    for prompt, ids, values in zip(
        prompts(), answer["completion_ids"], answer["logprobs"], strict=True
    ):
        expected = chosen(reference.logprobs(folder, prompt, ids), ids)
        differences += [abs(one - two) for one, two in zip(flat(values), expected, strict=True)]
    return sum(differences) / len(differences)


COLUMNS: dict[str, Callable[[Row], None]] = {"LoRA": column_adapter}
