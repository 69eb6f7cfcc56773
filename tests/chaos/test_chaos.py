"""Pairs of faults at each round trip of each operation, under load.

make test-chaos                       60 seconds
make test-chaos SECONDS=1800 SEED=7   longer, from another seed; prints the table of cells
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.rounds import Cell, Harness, Report, random_cell

pytestmark = pytest.mark.chaos
SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
# What has failed once, and what no run may leave out.
ALWAYS = [
    Cell("folder update", "ApplyUpdate:before", "killed", "none", 0),
    Cell("folder update", "ApplyUpdate:before", "killed", "none", 1),
]


async def play(folder: Path, cells: list[tuple[Cell, int]], seconds: float) -> list[Report]:
    cluster = Cluster(folder)
    await cluster.start()
    harness = Harness(cluster, SEED)
    reports: list[Report] = []
    began = time.monotonic()
    try:
        for cell, seed in cells:
            if time.monotonic() - began > seconds:
                break
            report = await harness.play(cell, seed)
            reports.append(report)
            print(f"{len(reports):4} seed {seed}: {cell}: {report.whole_s:.1f} s", flush=True)
            assert not report.wrong, (
                f"seed {seed}, Cell{cell!r}\n"
                + "\n".join(report.wrong[:20])
                + "\n"
                + cluster.tail()
            )
    finally:
        show(reports, harness)
        await cluster.close()
    return reports


def show(reports: list[Report], harness: Harness) -> None:
    """The counts of cells, and what came of the requests meanwhile."""
    counts = Counter(
        (report.cell.fault, report.cell.operation) for report in reports if report.is_reached
    )
    operations = sorted({name for _, name in counts})
    print("\n| fault | " + " | ".join(operations) + " |")
    print("|---" * (len(operations) + 1) + "|")
    for fault in sorted({name for name, _ in counts}):
        row = " | ".join(str(counts[fault, name] or "") for name in operations)
        print(f"| {fault} | {row} |")
    longest = max((report.whole_s for report in reports), default=0.0)
    print(
        f"\n{len(reports)} rounds, {sum(counts.values())} at their point; whole after {longest:.1f} s "
        f"at most; at most {harness.clients.most_in_flight} requests in flight; ends: "
        f"{json.dumps(harness.clients.ends)}"
    )


def test_pairs_of_faults(tmp_path: Path):
    chance = random.Random(SEED)
    seeds = [chance.randrange(10**6) for _ in range(100_000)]
    cells = [(cell, 1) for cell in ALWAYS]
    cells += [(random_cell(random.Random(seed)), seed) for seed in seeds]
    asyncio.run(play(tmp_path, cells, SECONDS))
