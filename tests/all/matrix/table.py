"""Writes what the matrix found as tables into docs/models.md: `python -m tests.all.matrix.table`.

Ends with 1 if a cell is neither exact nor a limit that `tests/all/matrix/limits/` shows.
"""

import importlib.metadata
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from harness.servers import REPOSITORY
from tests.all.matrix.cells import read, results_file, vllm_version
from tests.all.matrix.image_families import IMAGE_FAMILIES
from tests.all.matrix.limits import LIMITS, limit_of
from tests.all.matrix.row import COLUMNS, PARTS
from tests.kit.models.model_families import FAMILIES

DOCUMENT = REPOSITORY / "docs" / "models.md"
# What a row stands for, where its name does not say it.
LABELS = {
    "llama": "Llama 3", "llama-tied": "Llama 3, tied", "qwen2": "Qwen2.5", "gemma3": "Gemma 3",
    "gemma3-untied": "Gemma 3, untied", "gemma2": "Gemma 2", "glm4": "GLM-4", "glm4-tied": "GLM-4, tied",
    "glm4_moe": "GLM-4.5-MoE", "olmoe": "OLMoE", "olmo3": "OLMo 3", "gpt_oss": "GPT-OSS",
    "deepseek_v3": "DeepSeek-V3", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE", "mixtral": "Mixtral",
    "qwen3_next": "Qwen3-Next", "mistral": "Mistral", "phi4": "Phi-4", "smollm3": "SmolLM3",
    "granite": "Granite-MoE", "granite4": "Granite 4", "nemotron_h": "Nemotron-H",
    "falcon_h1": "Falcon-H1", "minimax_m2": "MiniMax-M2", "mimo_v2": "MiMo-V2",
    "qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE", "gemma3_images": "Gemma 3", "internvl": "InternVL3",
    "llava_onevision": "LLaVA-OneVision", "mistral3": "Mistral Small 3.1", "smolvlm": "SmolVLM",
    "glm4v": "GLM-4.1V",
}  # fmt: skip


def main() -> None:
    cells = {(one["row"], one["column"]): one for one in read(results_file())}
    wrong: list[str] = []
    used: list[str] = []

    def shown(row: str, column: str) -> str:
        cell = cells.get((row, column))
        if cell is None:
            wrong.append(f"{row}, {column}: not tried")
            return "?"
        if cell["result"] == "exact":
            return "✓"
        limit = limit_of(row, column)
        if limit is None:
            wrong.append(f"{row}, {column}: {cell['result']}")
            return "wrong"
        if limit not in used:
            used.append(limit)
        return str(used.index(limit) + 1)

    text = [one for part in PARTS if part != "images" for one in COLUMNS[part]]
    tables = [
        table("Text", FAMILIES, text, shown),
        table("Images", IMAGE_FAMILIES, list(COLUMNS["images"]), shown),
    ]
    notes = [
        textwrap.fill(f"{number}. {LIMITS[one]}", 100, subsequent_indent="   ")
        for number, one in enumerate(used, 1)
    ]
    dates = sorted(one["date"] for one in cells.values())
    transformers = importlib.metadata.version("transformers")
    head = f"vLLM {vllm_version()} for CPUs, transformers {transformers}, {dates[-1]}:"
    body = "\n\n".join([head, *tables, "\n".join(notes)])
    replace_part("matrix", body)
    print("\n".join(wrong) or "every cell is exact or a known limit", file=sys.stderr)
    sys.exit(bool(wrong))


def read_part(name: str) -> str:
    """What stands between the document's marks of `name`."""
    begin, end = marks_of(name)
    return DOCUMENT.read_text().partition(begin)[2].partition(end)[0]


def replace_part(name: str, body: str) -> None:
    """Replaces what stands between the document's marks of `name`."""
    begin, end = marks_of(name)
    before, _, rest = DOCUMENT.read_text().partition(begin)
    after = rest.partition(end)[2]
    DOCUMENT.write_text(f"{before}{begin}\n{body}\n\n{end}{after}")


def marks_of(name: str) -> tuple[str, str]:
    """The lines before and after a part that this package writes."""
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"


def table(title: str, rows: Iterable[str], columns: list[str], shown: Any) -> str:
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        found = [shown(row, column) for column in columns]
        lines.append(f"| {LABELS[row]} | {' | '.join(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
