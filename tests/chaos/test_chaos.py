"""Pairs of faults at each round trip of each operation, under load.

make test-chaos                       60 seconds
make test-chaos SECONDS=1800 SEED=7   longer, from another seed; prints the table of cells
"""

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.rounds import Cell, Harness, Report, all_cells

pytestmark = pytest.mark.chaos
SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
# What a longer run has found, with its seed.
FAILED_ONCE = [
    # A commit was undone by a front end that could reach no worker while all lost their memory.
    (
        Cell("folder update", "AwaitStep(prepare):after", "front end killed", "all killed", 2),
        439931,
    ),
]
# No run may leave these out.
DEATHS_AMID_A_COMMIT = [
    Cell("folder update", "ApplyUpdate:before", "killed", "none", 0),
    Cell("folder update", "ApplyUpdate:before", "killed", "none", 1),
]
# A process that ends is noticed at once: the pool waits for it to be started again, for no timeout.
RESTART_S = 12.0


async def play(
    cluster: Cluster, cells: Iterable[tuple[Cell, int]], seconds: float = float("inf")
) -> tuple[list[Report], set[str]]:
    """What came of each round, and how requests have ended in all of them."""
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
            missed = "" if report.is_reached else f", not reached: {report.refusal}"
            print(
                f"{len(reports):4} seed {seed}: {cell}: {report.whole_s:.1f} s{missed}", flush=True
            )
            assert not report.wrong, (
                f"seed {seed}, Cell{cell!r}\n"
                + "\n".join(report.wrong[:20])
                + "\n"
                + cluster.tail()
            )
    finally:
        show(reports, harness)
        await cluster.close()
    return reports, set(harness.clients.ends)


def show(reports: list[Report], harness: Harness) -> None:
    """The counts of cells, and what came of the requests meanwhile."""
    reached = [report for report in reports if report.is_reached]
    cells = [one.cell for one in reached]
    table("fault, by round trip", [(f"{one.operation}: {one.point}", one.fault) for one in cells])
    table("second fault, by first", [(one.fault, one.second_fault) for one in cells])
    longest = max((report.whole_s for report in reports), default=0.0)
    kinds = {(one.operation, one.point, one.fault) for one in cells}
    print(
        f"\n{len(reports)} rounds, {len(reached)} at their point, {len(kinds)} different ones; whole after {longest:.1f} s "
        f"at most; at most {harness.clients.most_in_flight} requests in flight; ends: "
        f"{json.dumps(harness.clients.ends)}"
    )


def table(title: str, pairs: list[tuple[str, str]]) -> None:
    """How often there was each pair of a row and a column."""
    counts = Counter(pairs)
    columns = sorted({column for _, column in pairs})
    print(f"\n| {title} | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for row in sorted({row for row, _ in pairs}):
        print(f"| {row} | " + " | ".join(str(counts[row, one] or "") for one in columns) + " |")


def test_pairs_of_faults(tmp_path: Path):
    cells = itertools.chain(FAILED_ONCE, all_cells(random.Random(SEED)))
    asyncio.run(play(Cluster(tmp_path), cells, SECONDS))


def test_a_worker_that_dies_amid_a_commit_holds_nobody_up(tmp_path: Path):
    # Longer than this test may take: a pool that waits for it is found out.
    cluster = Cluster(tmp_path, update_timeout_s=2 * RESTART_S)
    reports, ends = asyncio.run(play(cluster, [(cell, 1) for cell in DEATHS_AMID_A_COMMIT]))
    assert max(report.whole_s for report in reports) < RESTART_S
    # Others do what it had to do, but for the streams that it had begun.
    assert ends <= {"answered", "streamed", "stream: generation_failed"}
