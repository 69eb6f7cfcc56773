"""Cells that this version of vLLM cannot do, each with a script that shows it without titopool.

`python -m tests.matrix.limits.NAME` fails in `LLM.generate` or before it.
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


def limit_of(row: str, column: str) -> str | None:
    """The name of the script that shows why the cell is not exact."""
    return CELLS.get((row, column)) or CELLS.get((row, "*"))
