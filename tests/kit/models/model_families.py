"""Tiny random models of the families whose updates are tested, made from transformers' configs.

Each has what makes its family special: grouped-query attention, a sliding window shorter than the
prompt, more experts than a token is routed to, tied and untied heads.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from titopool.demo_model import VOCAB_SIZE, make_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "initializer_range": 0.1,
    "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FOUR_LAYERS = {"num_hidden_layers": 4}
WINDOW = {
    **FOUR_LAYERS, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 256, "truncate": False,
}  # fmt: skip
# What vLLM assumes where a config does not name it at its top level.
MIMO_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
# Of the tensors of a layer that predicts a further token, which vLLM does not load.
FURTHER_TOKEN = "model.layers.4."
# The class of the config, and its fields besides those of `SHAPE`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3TextConfig", {**WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gemma3-untied": (
        "Gemma3TextConfig", {**WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": False},
    ),
    "glm4": ("Glm4Config", {"attention_bias": True}),
    "glm4-tied": ("Glm4Config", {"tie_word_embeddings": True}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    # Latent attention; dense layers, then groups of experts chosen by corrected scores.
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **EXPERTS, **FOUR_LAYERS, "n_routed_experts": 8, "n_shared_experts": 1,
            "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2, "q_lora_rank": 64, "kv_lora_rank": 512,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
            "num_key_value_heads": 4, "head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        },
    ),
    # Checkpoints name the tensors of an expert gate, up and down.
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4}),
    # Checkpoints name them w1, w3 and w2.
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # The checkpoint has a layer that neither transformers nor vLLM loads.
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **EXPERTS, **FOUR_LAYERS, "n_routed_experts": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 2, "num_nextn_predict_layers": 1,
        },
    ),
    # Checkpoints have all experts in one tensor.
    "granite": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # A bias of the router that is a parameter in vLLM and a buffer in transformers.
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16,
            # transformers before 5.18 does not read `rotary_dim`.
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5,
            },
            "use_routing_bias": True, "scoring_func": "sigmoid",
        },
    ),
    # Sinks in the layers with the window.
    "mimo_v2": (
        "MiMoV2FlashConfig",
        {
            **EXPERTS, **WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2,
            "n_routed_experts": 4, "v_head_dim": 32, "mlp_layer_types": ["dense", "sparse"] * 2,
            "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), MIMO_ROPE),
            # The checkpoint's names of these fields, which vLLM reads.
            "hybrid_layer_pattern": [0, 1] * 2, "moe_layer_freq": [0, 1] * 2, "sliding_window_size": 16,
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 32,
            "swa_v_head_dim": 32, "add_swa_attention_sink_bias": True, "layernorm_epsilon": 1e-5,
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            **WINDOW, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    # Checkpoints and module have query, key and value in one tensor, and gate and up.
    "phi4": ("Phi3Config", {}),
    "olmo3": ("Olmo3Config", WINDOW),
    # Each second layer has no positions.
    "smollm3": ("SmolLM3Config", {**FOUR_LAYERS, "no_rope_layers": [1, 0, 1, 0]}),
    # Linear attention with a state.
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **EXPERTS, **FOUR_LAYERS, "num_experts": 4, "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    # Mamba's layers between those of attention.
    "granite4": (
        "GraniteMoeHybridConfig",
        {
            **FOUR_LAYERS, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 64, "mamba_n_heads": 8,
            "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_chunk_size": 32, "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "num_hidden_layers": 6, "hybrid_override_pattern": "M*-M*-", "mamba_num_heads": 8,
            "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "expand": 2,
            "chunk_size": 32,
        },
    ),
    # Both in each layer.
    "falcon_h1": (
        "FalconH1Config",
        {
            "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 1, "mamba_chunk_size": 32,
        },
    ),
}  # fmt: skip


def config_of(family: str) -> Any:
    """A tiny config of `family`."""
    kind, options = FAMILIES[family]
    fields = {**SHAPE, **options}
    if family == "phi4":
        # Its heads have what the hidden size leaves.
        del fields["head_dim"]
    return getattr(transformers, kind)(**fields)


def make_family(family: str, folder: Path, seed: int) -> str:
    """Writes a random model of `family` with its tokenizer to a new `folder`; returns its path.

    Models with different seeds differ in every parameter and persistent buffer.
    """
    folder.mkdir()
    make_tokenizer(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    vary(model)
    model.save_pretrained(folder)
    if family == "glm4_moe":
        extra = {f"{FURTHER_TOKEN}eh_proj.weight": torch.ones(2, 2)}
        save_file(extra, folder / "more.safetensors")
    return str(folder)


@torch.no_grad()
def vary(model: Any) -> None:
    """Changes what transformers begins with one value: norms, biases, sinks, padding."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            is_small = tensor.dim() == 1 or name.endswith("_bias")
            tensor.add_(torch.randn_like(tensor), alpha=0.2 if is_small else 0.01)


def module_tensors(folder: str) -> list[tuple[str, Any]]:
    """Parameters and persistent buffers by the names of transformers' module."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return list(model.state_dict().items())
