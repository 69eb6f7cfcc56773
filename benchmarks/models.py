"""Writes models with random weights, so that no benchmark needs a download."""

from pathlib import Path
from typing import Any

# Fields of transformers' Qwen3Config, or Qwen3MoeConfig with experts; "tiny" is the demo model
# (hidden 256, 4 layers).
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "qwen3-0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
}  # fmt: skip

# Ids of normal tokens in every shape; special tokens are outside.
PROMPT_IDS = range(10, 2000)


def make_model(shape: str, folder: Path, *, with_weights: bool) -> str:
    """Writes a Qwen3 of `shape` and a small tokenizer to `folder`; returns its path.

    Args:
        with_weights: False: the server must run with vLLM's `load_format="dummy"`, which TRL's
            server does not offer.
    """
    from titopool import demo_model

    if shape == "tiny":
        demo_model.make_model(folder)
        return str(folder)
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    folder.mkdir(parents=True)
    demo_model.make_tokenizer(folder)
    is_mixture = "num_experts" in SHAPES[shape]
    kind, name = (
        (Qwen3MoeConfig, "Qwen3MoeForCausalLM") if is_mixture else (Qwen3Config, "Qwen3ForCausalLM")
    )
    config = kind(**SHAPES[shape], eos_token_id=0, architectures=[name], dtype="bfloat16")
    if not with_weights:
        config.save_pretrained(folder)
        return str(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    import sys

    # Runs in a process of its own, so that its GPU memory is free afterwards.
    make_model(sys.argv[1], Path(sys.argv[2]), with_weights=sys.argv[3] == "weights")
