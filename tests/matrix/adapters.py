"""The column of the matrix for LoRA adapters, against transformers with merged weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM

from tests.matrix.text import greedy_answer
from tests.servers import Server
from titopool.demo_model import make_tokenizer

# The projections of attention that families have, of which each adapter changes all it finds.
TARGETS = ("q_proj", "v_proj", "qkv_proj", "o_proj")


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
    greedy_answer(row.server, merged, lora_name="style")
    greedy_answer(row.server, row.own)


COLUMNS: dict[str, Callable[[Row], None]] = {"LoRA": column_adapter}
