"""The table of all rows that were ever measured.

python -m benchmarks.weights.table FILE.jsonl     # writes FILE.md again
"""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLUMNS = (
    "model", "server", "requests in flight", "staging", "first", "median", "worst",
    "generation paused", "GPU memory, first", "GPU memory, later", "trainer's memory", "call, host",
)  # fmt: skip


def add(rows: Iterable[Row], file: Path) -> None:
    """Appends rows to `file` (JSON lines) and writes the table next to it."""
    with file.open("a") as output:
        output.writelines(json.dumps(row) + "\n" for row in rows)
    write(file)


def write(file: Path) -> None:
    """Writes the table of the rows in `file`."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [
        "Seconds of an update, until the new weights serve. Memory in GiB beyond what serving takes, "
        "or beyond the trainer's models. The call is the time at which it began.",
        "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(_line, rows),
    ]  # fmt: skip
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")


def row_of(runs: list[Row], **facts: Any) -> Row:
    """A row from the updates of one server; the first is apart."""
    later = runs[1:] or runs
    totals = [one["total_s"] for one in later]
    paused = [one["paused_s"] for one in later if "paused_s" in one]
    trainer = [one["trainer_bytes"] for one in runs if one.get("trainer_bytes")]
    return {
        **facts, "first_s": runs[0]["total_s"], "median_s": statistics.median(totals),
        "worst_s": max(totals), "paused_s": statistics.median(paused) if paused else None,
        "trainer_bytes": max(trainer, default=None),
        "first_gpu_bytes": runs[0].get("gpu_bytes"),
        "gpu_bytes": max((one["gpu_bytes"] for one in later if one.get("gpu_bytes")), default=None),
        "staging": next((one["staging"] for one in runs if "staging" in one), ""), "runs": runs,
    }  # fmt: skip


def _line(row: Row) -> str:
    gib = [_gib(row.get(name)) for name in ("first_gpu_bytes", "gpu_bytes", "trainer_bytes")]
    cells = [
        row["model"], row["server"], row["load"], row["staging"], _seconds(row["first_s"]),
        _seconds(row["median_s"]), _seconds(row["worst_s"]), _seconds(row["paused_s"]), *gib,
        f"{row['call']}, {row['host']}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _gib(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**30:.2f}"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
