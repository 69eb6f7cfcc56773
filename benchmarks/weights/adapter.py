"""A random LoRA adapter, so that updates can be measured with one loaded."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness.servers import Server

NAME = "adapter"
TARGETS = ("v_proj", "o_proj")
RANK, SCALE = 16, 2.0
# The adapter's product has the standard deviation 0.02, as initial weights have.
STD = 0.05


class Adapter:
    """Random matrices for the attention layers of a model, and their folder for servers."""

    def __init__(self, model: Any, folder: Path):
        generator = torch.Generator().manual_seed(3)
        self._products: dict[str, torch.Tensor] = {}
        tensors = {}
        for name, module in model.named_modules():
            if not name.endswith(TARGETS):
                continue
            height, width = module.weight.shape
            a = STD * torch.randn(RANK, width, generator=generator)
            b = STD * torch.randn(height, RANK, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            self._products[f"{name}.weight"] = SCALE * b @ a
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none",
            "target_modules": list(TARGETS), "task_type": "CAUSAL_LM",
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config))
        self._folder = folder

    def load(self, server: Server) -> None:
        """Loads the adapter at `server` as `NAME`."""
        body = {"lora_name": NAME, "lora_path": str(self._folder)}
        answer = server.post("/v1/load_lora_adapter", body)
        assert answer.status_code == 200, answer.text

    @contextlib.contextmanager
    def merged(self, model: Any) -> Iterator[None]:
        """Adds the adapter to the weights of `model` during the block."""
        originals = {}
        for name, product in self._products.items():
            weight = model.get_parameter(name).data
            originals[name] = weight.clone()
            weight += product.to(weight)
        try:
            yield
        finally:
            # Subtracting would round once more.
            for name, original in originals.items():
                model.get_parameter(name).data.copy_(original)
