"""The benchmarks report correct figures or end with an error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench import check_lengths
from benchmarks.report import rows_of
from benchmarks.targets import Titopool
from benchmarks.workload import Sizes, make_pattern
from tests.servers import REPOSITORY

SIZES = Sizes(num_prompts=2, input_len=4, output_len=3)


def answer(lengths: list[int], num_logprobs: list[int]) -> bytes:
    return json.dumps(
        {
            "completion_ids": [[1] * length for length in lengths],
            "logprobs": [[[-1.0]] * length for length in num_logprobs],
        }
    ).encode()


@pytest.mark.parametrize(
    "lengths, num_logprobs",
    [([3, 2], [3, 2]), ([3], [3]), ([3, 3], [3, 2]), ([3, 3, 3], [3, 3, 3])],
)
def test_a_run_with_wrong_token_counts_is_not_reported(lengths, num_logprobs):
    pattern = make_pattern("batch", SIZES, repeat=0)
    check_lengths(Titopool(1), pattern, [answer([3, 3], [3, 3])], num_expected=1)
    with pytest.raises(SystemExit, match="not reported"):
        check_lengths(Titopool(1), pattern, [answer(lengths, num_logprobs)], num_expected=1)


def test_repeats_use_different_prompts():
    first, second = (make_pattern("single", SIZES, repeat=number) for number in (0, 1))
    assert first.num_tokens == second.num_tokens == 6
    assert first.calls != second.calls


def test_a_run_with_failures_has_no_rate():
    run = {
        "num_workers": 1, "pattern": "batch", "num_calls": 1, "num_tokens": 6, "elapsed_s": 2.0,
        "latencies_s": {"p50": 1.0, "p99": 1.0, "max": 1.0}, "num_bytes": 60,
        "cpu_s": {"front_end": 0.0, "workers": 0.0},
    }  # fmt: skip
    bare = {**run, "target": "bare engine", "num_failures": 0}
    server = {**run, "target": "server", "num_failures": 1}
    rows = {row["target"]: row for row in rows_of({"runs": [bare, server]})}
    assert rows["bare engine"]["rate"] == 3
    assert rows["server"]["rate"] is None
    assert rows["server"]["num_failures"] == 1


@pytest.mark.server
def test_bench_front_runs(tmp_path: Path):
    options = ["--num-front-ends", "1", "--num-clients", "4", "--num-tokens", "16"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.front", *options, "--out", str(tmp_path / "front")],
        cwd=REPOSITORY, check=True, timeout=120, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    runs = json.loads((tmp_path / "front.json").read_text())["runs"]
    assert {run["answer"] for run in runs} == {"JSON", "no logprobs", "MessagePack"}
    assert all(run["num_failures"] == 0 and run["front_end_cpu_s"] > 0 for run in runs)
