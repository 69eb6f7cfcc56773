"""Writes the runs as a table (Markdown), a file (JSON) and a plot (PNG).

python -m benchmarks.report OUT.json        # table and plot of an existing file

"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workload import PATTERNS, Sizes, describe

BARE = "bare engine"
# The pattern of the engine with which a pattern is compared, if it is another one.
LIMIT_OF = {"single": "batch"}
COLUMNS = (
    "tok/s", "of the engine", "p50 ms", "p99 ms", "failures", "front-end CPU s / 1,000 tok",
    "workers' CPU s / 1,000 tok", "bytes / tok", "front-end memory / answers", "greatest / mean prompts of a worker",
)  # fmt: skip

Result = dict[str, Any]
Row = dict[str, Any]


def write(result: Result, out: Path) -> None:
    """Writes `out`.json, .md and .png, and prints the table."""
    save(result, out)
    table = markdown(result)
    out.with_suffix(".md").write_text(table)
    print(table)
    try:
        plot(result, out.with_suffix(".png"))
    except ImportError:
        print(
            "no plot: matplotlib is not installed here; run "
            f"`python -m benchmarks.report {out.with_suffix('.json')}` where it is installed",
            file=sys.stderr,
        )


def save(result: Result, out: Path) -> None:
    """Writes `out`.json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def rows_of(result: Result) -> list[Row]:
    """One row for each pattern and target: medians over the repeats."""
    rows = []
    targets = list(dict.fromkeys(run["target"] for run in result["runs"]))
    for pattern in PATTERNS:
        limit = _median_rate(_runs(result, BARE, LIMIT_OF.get(pattern, pattern)))
        for target in targets:
            runs = _runs(result, target, pattern)
            if runs:
                rows.append(_row(target, pattern, runs, limit))
    return rows


def _runs(result: Result, target: str, pattern: str) -> list[dict[str, Any]]:
    return [run for run in result["runs"] if run["target"] == target and run["pattern"] == pattern]


def _median_rate(runs: Sequence[dict[str, Any]]) -> float | None:
    """Tokens a second; None if a request failed."""
    if not runs or any(run["num_failures"] for run in runs):
        return None
    return statistics.median(run["num_tokens"] / run["elapsed_s"] for run in runs)


def _row(target: str, pattern: str, runs: list[dict[str, Any]], limit: float | None) -> Row:
    def median(value: Any) -> float:
        return statistics.median(map(value, runs))

    rate = _median_rate(runs)
    return {
        "target": target,
        "pattern": pattern,
        "rate": rate,
        "ratio": rate / limit / runs[0]["num_workers"] if rate and limit else None,
        "rates": [run["num_tokens"] / run["elapsed_s"] for run in runs],
        "p50_s": median(lambda run: run["latencies_s"]["p50"]),
        "p99_s": median(lambda run: run["latencies_s"]["p99"]),
        "num_failures": sum(run["num_failures"] for run in runs),
        "num_calls": runs[0]["num_calls"],
        "front_end_cpu": median(lambda run: 1000 * run["cpu_s"]["front_end"] / run["num_tokens"]),
        "workers_cpu": median(lambda run: 1000 * run["cpu_s"]["workers"] / run["num_tokens"]),
        "bytes": median(lambda run: run["num_bytes"] / run["num_tokens"]),
        "memory": median(lambda run: run.get("front_end_bytes", 0) / (run["num_bytes"] or 1)),
        "balance": median(lambda run: _greatest_over_mean(run.get("jobs_by_worker"))),
    }


def _greatest_over_mean(jobs_by_worker: list[float] | None) -> float:
    return max(jobs_by_worker) / statistics.mean(jobs_by_worker) if jobs_by_worker else 1.0


def markdown(result: Result) -> str:
    """The tables, one for each pattern."""
    sizes = Sizes(**result["sizes"])
    lines = [
        title_of(result["machine"]),
        "",
        f"{result['shape']}, {sizes.input_len} ids in and {sizes.output_len} out, logprobs 0; "
        f"medians of {result['repeats']}, spread in brackets. With w workers: w times the prompts, "
        "and the ratio is to w times the engine.",
    ]
    for pattern in PATTERNS:
        rows = [row for row in rows_of(result) if row["pattern"] == pattern]
        if rows:
            lines += ["", f"**{describe(pattern, sizes)}**", "", f"| | {' | '.join(COLUMNS)} |"]
            lines += ["|---" * (len(COLUMNS) + 1) + "|", *map(_line, rows)]
    return "\n".join(lines) + "\n"


def title_of(machine: dict[str, Any]) -> str:
    """Date, machine and versions in a line, of what `describe_machine` returned."""
    where = _gpus(machine) or f"{machine['num_cores']} cores of {machine['processor']}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['date']}, {where}; {machine['num_cores']} CPU cores; {versions}"


def _gpus(machine: dict[str, Any]) -> str:
    names = machine["gpus"]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _line(row: Row) -> str:
    name = row["target"]
    if 0 < row["num_calls"] <= 16 and row["pattern"] in ("single", "queue"):
        name += f" ({row['num_calls']} requests only)"
    rate = f"{row['rate']:,.0f}" if row["rate"] else "–"
    low, high = min(row["rates"]), max(row["rates"])
    is_bare = row["target"].startswith(BARE)
    ratio = f"{row['ratio']:.2f}" if row["ratio"] else "–"
    cells = [
        f"{rate} ({low:,.0f}–{high:,.0f})", ratio, f"{1e3 * row['p50_s']:,.1f}", f"{1e3 * row['p99_s']:,.1f}",
        str(row["num_failures"]), "–" if is_bare else f"{row['front_end_cpu']:.4f}",
        f"{row['workers_cpu']:.3f}", "–" if is_bare else f"{row['bytes']:.1f}", "–" if is_bare else f"{row['memory']:.1f}", f"{row['balance']:.2f}",
    ]  # fmt: skip
    return f"| {name} | {' | '.join(cells)} |"


def plot(result: Result, file: Path) -> None:
    """Bars: each server's ratio to the engine, by pattern."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows_of(result) if row["ratio"] and row["pattern"] != "short"]
    if not rows:
        # No ratios without runs of the bare engine.
        return
    patterns = [name for name in PATTERNS if any(row["pattern"] == name for row in rows)]
    targets = [
        name for name in dict.fromkeys(row["target"] for row in rows) if not name.startswith(BARE)
    ]
    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    width = 0.8 / max(1, len(targets))
    for index, target in enumerate(targets):
        ratios = {row["pattern"]: row["ratio"] for row in rows if row["target"] == target}
        places = [number + index * width for number in range(len(patterns))]
        bars = axes.bar(places, [ratios.get(name, 0) for name in patterns], width, label=target)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    sizes = Sizes(**result["sizes"])
    axes.set_xticks([number + 0.4 - width / 2 for number in range(len(patterns))])
    axes.set_xticklabels(
        [describe(name, sizes).replace(", ", ",\n") for name in patterns], fontsize=8
    )
    axes.set_ylabel("tokens a second, relative to the bare engine")
    axes.set_title(f"{result['shape']}, {_gpus(result['machine']) or 'CPU'}, "
                   f"{result['machine']['date']}", fontsize=10)  # fmt: skip
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    write(json.loads(source.read_text()), source.with_suffix(""))
