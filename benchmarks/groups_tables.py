"""The tables of `benchmarks.groups`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

BARE, TITOPOOL, VLLM, VLLM_4 = "bare engine", "titopool", "vllm serve", "vllm serve, 4 API servers"
TARGETS = (BARE, TITOPOOL, VLLM, VLLM_4)
GROUPS = (
    "", "tok/s, median (all)", "mean length", "running until 80 %", "tokens a step",
    "of the engine", f"of {VLLM}",
)  # fmt: skip
FIRST_TOKENS = ("", "p50 ms", "p99 ms", "requests", "step, ms", "steps over idle")

Result = Mapping[str, Any]
Runs = Sequence[Mapping[str, Any]]


def groups_table(result: Result) -> str:
    """A table for each pattern; ratios are between runs of one round: their median (all)."""
    lines = [
        f"{_begin(result)}, {result['completions']} completions of at most {result['max_tokens']} "
        f"tokens; {result['stop']}"
    ]
    for pattern in result["patterns"]:
        lines += ["", f"**{pattern}**", "", *_head(GROUPS)]
        for n in result["n"]:
            of = {target: _runs(result, pattern, n, target) for target in TARGETS}
            lines += [_groups_line(n, of, target) for target in TARGETS if of[target]]
    return "\n".join(lines) + "\n"


def _begin(result: Result) -> str:
    machine = result["machine"]
    where = ", ".join(machine["gpus"]) or f"{machine['num_cores']} cores of {machine['processor']}"
    return (
        f"{machine['date']}, {machine['commit']}, {where}; {result['shape']}, {result['slots']} slots, "
        f"{result['input_len']} ids in"
    )


def _head(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _runs(result: Result, pattern: str, n: int, target: str) -> list[Mapping[str, Any]]:
    """The runs of a row, in the order of the rounds."""
    wanted = (pattern, n, target)
    found = [one for one in result["runs"] if (one["pattern"], one["n"], one["target"]) == wanted]
    return sorted(found, key=lambda run: run["round"])


def _groups_line(n: int, of: Mapping[str, Runs], target: str) -> str:
    runs = of[target]

    def ratio(to: str) -> str:
        pairs = zip(runs, of[to], strict=True) if of[to] and to != target else ()
        return _all([one["tokens_per_s"] / other["tokens_per_s"] for one, other in pairs], ".2f")

    def mean(key: str) -> str:
        found = [run[key] for run in runs if run[key] is not None]
        return f"{statistics.mean(found):.1f}" if found else "–"

    rates = _all([run["tokens_per_s"] for run in runs], ",.0f")
    cells = [rates, mean("mean_len"), mean("running"), mean("tokens_per_step")]
    return f"| n={n}, {target} | {' | '.join([*cells, ratio(BARE), ratio(VLLM)])} |"


def _all(values: Sequence[float], form: str) -> str:
    """The median, and all values in the order of the rounds; a dash if there are none."""
    if not values:
        return "–"
    return f"{statistics.median(values):{form}} ({', '.join(f'{one:{form}}' for one in values)})"


def first_tokens_table(result: Result) -> str:
    """A row for each load; `steps over idle` is (p99 - p99 beside nothing) / the row's own step."""
    lines = [f"{_begin(result)}, {result['front_ends']} front ends; {result['stop']}", ""]
    lines += _head(FIRST_TOKENS)
    idle_s: dict[str, float] = {}
    for run in result["runs"]:
        over_s = run["p99_s"] - idle_s.setdefault(run["target"], run["p99_s"])
        late = f", {run['num_late']} late" if run["num_late"] else ""
        cells = [
            f"{run['target']} beside {run['beside']}", f"{1e3 * run['p50_s']:,.1f}",
            f"{'≥ ' if late else ''}{1e3 * run['p99_s']:,.1f}", f"{run['num_requests']}{late}",
            f"{1e3 * run['step_s']:.1f}" if run["step_s"] else "–",
            f"{over_s / run['step_s']:.1f}" if run["step_s"] else "–",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
