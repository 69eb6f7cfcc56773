"""Cells that this version of vLLM cannot do, each with a script that shows it without titopool.

`python -m tests.all.matrix.limits.NAME` fails in `LLM.generate` or before it.
"""

# Sentences for docs/models.md, by the name of the script.
LIMITS = {
    "linear_attention": (
        "vLLM's CPU build computes gated linear attention in bfloat16 only, and the server refuses "
        "float32. On a CPU, use `--dtype bfloat16`; log-probabilities are then as rough as it is."
    ),
    "expert_adapters": (
        "vLLM's kernels for adapters of experts need Triton, so the server does not start with "
        "`--enable-lora` for a mixture of experts on a CPU. Use a GPU."
    ),
    "latent_attention": (
        "vLLM 0.27.1 has no latent attention on a CPU, and 0.28 fails when it imports it. Neither "
        "starts. Use a GPU, or a newer vLLM."
    ),
    "latent_attention_in_float32": (
        "On a GPU, vLLM 0.25.1 has no latent attention in float32 and does not start. Use `--dtype "
        "bfloat16`."
    ),
    "recurrent_layer_names": (
        "vLLM 0.25.1 does not know the name that transformers 5.17 gives to recurrent layers, and does "
        "not start. Use a newer vLLM."
    ),
    "sinks": (
        "vLLM 0.27.1 to 0.30 compute attention with sinks in bfloat16 only on a CPU and do not start in "
        "float32. Use a GPU, or a newer vLLM."
    ),
    "causal_convolution": (
        "vLLM 0.29 to 0.31 compute the convolution of recurrent layers in bfloat16 only on a CPU and do "
        "not start in float32. Use `--dtype bfloat16`, or a newer vLLM."
    ),
    "image_attention": (
        "Tokens of an image should see all of the image. vLLM's CPU build lets them see its start "
        "only, so the server refuses images there. Use a GPU."
    ),
}
EXPERTS = (
    "olmoe", "gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral", "glm4_moe", "granite", "mimo_v2",
    "minimax_m2", "granite4",
)  # fmt: skip
# The script for each row and column; `*` is every column.
CELLS = {
    ("qwen3_next", "*"): "linear_attention",
    ("gemma3_images", "*"): "image_attention",
    **{(row, "LoRA"): "expert_adapters" for row in EXPERTS},
}
# Rows that only some older versions cannot do.
OLDER = {
    "0.25.1": {"deepseek_v3": "latent_attention_in_float32", "granite4": "recurrent_layer_names"},
    "0.27.1": {"deepseek_v3": "latent_attention", "gpt_oss": "sinks"},
    "0.28.0": {"deepseek_v3": "latent_attention", "gpt_oss": "sinks"},
    "0.29.0": {"gpt_oss": "sinks", "granite4": "causal_convolution"},
    "0.30.0": {"gpt_oss": "sinks", "granite4": "causal_convolution"},
    "0.31.0": {"granite4": "causal_convolution"},
}
# What vLLM says there, in the script too: another error is no limit.
ERRORS = {
    "latent_attention": (
        "MLA is not supported on CPU", "Unknown attention backend: 'CPU_MLA'",
        "cannot import name 'compile_flash_attn_varlen_func_from_specs'",
    ),
    "latent_attention_in_float32": ("No valid attention backend found for cuda",),
    "recurrent_layer_names": ("KeyError: 'linear_attention'",),
    "sinks": ("expected scalar type BFloat16 but found Float",),
    "causal_convolution": ('"causal_conv1d_fwd_kernel_impl" not implemented for \'Float\'',),
}  # fmt: skip


def limit_of(row: str, column: str, version: str = "", result: str = "") -> str | None:
    """The name of the script that shows why the cell is not exact."""
    here = CELLS.get((row, column)) or CELLS.get((row, "*"))
    older = OLDER.get(version, {}).get(row)
    if here is None and older and any(one in result for one in ERRORS[older]):
        return older
    return here
