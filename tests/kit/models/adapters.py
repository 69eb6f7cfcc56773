"""Random LoRA adapters of the tiny model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RANK, SCALE = 4, 2.0
TARGETS = {"q_proj": (256, 256), "v_proj": (256, 128), "o_proj": (256, 256)}


def make_adapter(base: str, root: Path, name: str, seed: int) -> None:
    """Writes a random adapter, and the base model with the adapter merged into its weights."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = {}
    for index, layer in enumerate(model.model.layers):
        for target, (width, height) in TARGETS.items():
            a = torch.randn(RANK, width, generator=generator) * 0.2
            b = torch.randn(height, RANK, generator=generator) * 0.2
            prefix = f"base_model.model.model.layers.{index}.self_attn.{target}"
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = b
            with torch.no_grad():
                getattr(layer.self_attn, target).weight += SCALE * b @ a
    folder = root / name
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, "target_modules": list(TARGETS),
        "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(root / f"merged-{name}")
    AutoTokenizer.from_pretrained(base).save_pretrained(root / f"merged-{name}")
