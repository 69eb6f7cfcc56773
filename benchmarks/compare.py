"""What changed between two results of `make bench`, beyond the noise: `python -m benchmarks.compare A B`.

A and B are JSON files that `benchmarks.everything` or `benchmarks.bench` wrote. For each target and
measure in both it prints the speed of B over that of A, with the 95 % interval over the runs. The speed
is a rate, or the inverse of a time. For servers it prints the
same after a division by the bare engine of each file, which takes out the machine, and says whether
that interval leaves out 1. Where the engine has no such measure, the machine stays in. Ends with 1 if a server became slower. One run of each has no interval.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.everything import RATES, Value
from benchmarks.intervals import Ratio, unpaired
from benchmarks.report import BARE, LIMIT_OF
from benchmarks.workload import Sizes

Rates = dict[tuple[str, str], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, metavar="A")
    parser.add_argument("new", type=Path, metavar="B")
    given = parser.parse_args()
    old, new = (json.loads(one.read_text()) for one in (given.old, given.new))
    for name, result in (("A", old), ("B", new)):
        machine = result["machine"]
        chips = ", ".join(machine["gpus"]) or f"{machine['num_cores']} cores"
        print(f"{name}: {machine['date']}, {machine['commit']}, {result['shape']}, {chips}")
    for result in (old, new):
        # Results of before a size existed have its default.
        result["sizes"] = asdict(Sizes(**result["sizes"])) if "sizes" in result else None
    for field in ("shape", "sizes"):
        if old[field] != new[field]:
            sys.exit(f"expected the same {field} in both, got {old[field]} and {new[field]}")
    if old.get("engine_options") != new.get("engine_options"):
        print(
            f"the engines' options differ: {old.get('engine_options')}, {new.get('engine_options')}"
        )
    rows = compare(speeds_of(old), speeds_of(new))
    print("\n".join(rows) or "no target and pattern is in both")
    sys.exit(any(row.endswith("slower") for row in rows))


def speeds_of(result: Mapping[str, Any]) -> Rates:
    """Speeds by target and measure, whichever benchmark wrote `result`."""
    if "runs" in result:
        return rates_of(result["runs"])
    found: Rates = {}
    for one in map(Value._make, map(dict.values, result["values"])):
        speed = one.value if one.row.endswith(RATES) else 1 / one.value
        found.setdefault((one.target, one.row), []).append(speed)
    return found


def rates_of(runs: Sequence[Mapping[str, Any]]) -> Rates:
    """Tokens a second of each run without failures, by target and pattern."""
    found: Rates = {}
    for run in runs:
        if not run["num_failures"]:
            key = run["target"], run["pattern"]
            found.setdefault(key, []).append(run["num_tokens"] / run["elapsed_s"])
    return found


def compare(old: Rates, new: Rates) -> list[str]:
    return [_row(key, old, new) for key in old if key in new]


def _row(key: tuple[str, str], old: Rates, new: Rates) -> str:
    target, pattern = key
    head = f"{target}, {pattern}: "
    limit = (BARE, LIMIT_OF.get(pattern, pattern))
    has_limit = target != BARE and limit in old and limit in new
    keys = [key, limit] if has_limit else [key]
    if min(len(rates[one]) for rates in (old, new) for one in keys) < 2:
        return f"{head}{_mean(new[key]) / _mean(old[key]):.3f} (one run, so its noise is unknown)"
    plain = unpaired([new[key]], [old[key]])
    if not has_limit:
        verdict = "" if target == BARE else f": {_verdict(plain)}"
        return f"{head}{_shown(plain)}{verdict}"
    part = unpaired([new[key], old[limit]], [old[key], new[limit]])
    return f"{head}{_shown(plain)}, of the engine {_shown(part)}: {_verdict(part)}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shown(ratio: Ratio) -> str:
    return f"{ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _verdict(ratio: Ratio) -> str:
    if ratio.low > 1:
        return "faster"
    return "slower" if ratio.high < 1 else "within the noise"


if __name__ == "__main__":
    main()
