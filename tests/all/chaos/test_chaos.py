"""Pairs of faults at each round trip of each operation, under load.

make test-all PART=chaos                       60 seconds
make test-all PART=chaos SECONDS=1800 SEED=7   longer, from another seed; prints the table of cells
"""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.all.chaos.agents import ChatAgent
from tests.all.chaos.cluster import Cluster
from tests.all.chaos.rounds import SECONDS, SEED, Cell, Harness, Report, all_cells

# Failures that longer runs have found, with their seeds.
FAILED_ONCE = [
    # A front end that reached no worker undid a commit while all workers lost their state.
    (
        Cell("folder update", "AwaitStep(prepare):after", "front end killed", "all killed", 2),
        439931,
    ),
]
# Every run includes these.
DEATHS_DURING_A_COMMIT = [
    Cell("folder update", "ApplyUpdate:before", "killed", "none", 0),
    Cell("folder update", "ApplyUpdate:before", "killed", "none", 1),
]
# Chats in sessions: their front ends import what reads a tokenizer at each of their starts.
CHAT_CELLS = [
    Cell("generation", "Generate:before", "killed, back", "clients left", 0),
    Cell("stream", "Chunk:after", "killed", "cut", 1),
    Cell("generation", "Generate:after", "front end killed", "partitioned", 2),
    Cell("stream", "Chunk:after", "front ends killed", "clients left", 0),
]
CHAT_PATIENCE_S = 60.0
# Seconds for a restart. The pool notices a dead process at once and waits for no timeout.
RESTART_S = 12.0


async def play(
    cluster: Cluster,
    cells: Iterable[tuple[Cell, int]],
    seconds: float = float("inf"),
    **options: Any,
) -> tuple[list[Report], set[str]]:
    """Runs the rounds; returns their reports, and all outcomes of requests.

    Args:
        options: of the harness.
    """
    await cluster.start()
    harness = Harness(cluster, SEED, **options)
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
                f"{len(reports):4} seed {seed}: {cell}: {report.recovery_s:.1f} s{missed}",
                flush=True,
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
    return reports, set(harness.clients.outcomes)


def show(reports: list[Report], harness: Harness) -> None:
    """Prints the counts of cells and the outcomes of requests."""
    reached = [report for report in reports if report.is_reached]
    cells = [one.cell for one in reached]
    table("fault, by round trip", [(f"{one.operation}: {one.point}", one.fault) for one in cells])
    table("second fault, by first", [(one.fault, one.second_fault) for one in cells])
    longest = max((report.recovery_s for report in reports), default=0.0)
    kinds = {(one.operation, one.point, one.fault) for one in cells}
    print(
        f"\n{len(reports)} rounds, {len(reached)} at their point, {len(kinds)} different ones; whole after {longest:.1f} s "
        f"at most; at most {harness.clients.most_in_flight} requests in flight; ends: "
        f"{json.dumps(harness.clients.outcomes)}"
    )


def table(title: str, pairs: list[tuple[str, str]]) -> None:
    """Prints how often each pair of a row and a column occurred."""
    counts = Counter(pairs)
    columns = sorted({column for _, column in pairs})
    print(f"\n| {title} | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for row in sorted({row for row, _ in pairs}):
        print(f"| {row} | " + " | ".join(str(counts[row, one] or "") for one in columns) + " |")


def test_the_pool_recovers_from_pairs_of_faults(tmp_path: Path):
    cells = itertools.chain(FAILED_ONCE, all_cells(random.Random(SEED)))
    asyncio.run(play(Cluster(tmp_path), cells, SECONDS))


def test_a_worker_that_dies_during_a_commit_delays_no_other(tmp_path: Path):
    for number, cell in enumerate(DEATHS_DURING_A_COMMIT):
        # A pool of its own, because a job that loses two workers fails. One that waits for this
        # timeout fails the test.
        root = tmp_path / str(number)
        root.mkdir()
        cluster = Cluster(root, update_timeout_s=2 * RESTART_S)
        reports, outcomes = asyncio.run(play(cluster, [(cell, 1)]))
        assert max(report.recovery_s for report in reports) < RESTART_S
        # Other workers take over its jobs, except for streams that have begun.
        assert outcomes <= {
            "answered", "streamed", "stream: generation_failed", "agent: a turn", "agent: turns",
            "agent: played", "agent's stream: generation_failed",
        }  # fmt: skip


def test_agents_that_chat_in_sessions_keep_their_turns(tmp_path: Path):
    cells = [(cell, SEED + number) for number, cell in enumerate(CHAT_CELLS)]
    cluster = Cluster(tmp_path, has_tokenizer=True)
    options = {"kind": ChatAgent, "num_clients": 4, "patience_s": CHAT_PATIENCE_S}
    _, outcomes = asyncio.run(play(cluster, cells, **options))
    assert "agent: a turn" in outcomes
