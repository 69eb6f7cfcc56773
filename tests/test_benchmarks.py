"""The benchmarks report correct figures or end with an error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.bench import check_lengths
from benchmarks.compare import compare, rates_of
from benchmarks.intervals import paired, unpaired
from benchmarks.report import rows_of
from benchmarks.targets import Titopool
from benchmarks.weights.table import row_of
from benchmarks.weights.trainer import checkpoint_tensors
from benchmarks.workload import Sizes, make_pattern
from tests.model_families import make_family
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


def test_intervals_are_those_of_student_and_welch():
    """Of logarithms: 0.1, 0.2 and 0.3; and of 0.1 and 0.3 less -0.1 and 0.1."""
    e = 2.718281828459045
    found = paired([e**0.1, e**0.2, e**0.3])
    assert found == pytest.approx(
        (e**0.2, e ** (0.2 - 4.303 / 300**0.5), e ** (0.2 + 4.303 / 300**0.5))
    )
    found = unpaired([[e**0.1, e**0.3]], [[e**-0.1, e**0.1]])
    reach = 4.303 * 0.02**0.5
    assert found == pytest.approx((e**0.2, e ** (0.2 - reach), e ** (0.2 + reach)))
    assert unpaired([[2.0, 2.0]], [[1.0, 1.0]]) == pytest.approx((2, 2, 2))
    # Two more groups with the same noise: twice the variance, and four degrees of freedom.
    group = [e**-0.1, e**0.1]
    reach = 2.776 * 0.04**0.5
    assert unpaired([group] * 2, [group] * 2) == pytest.approx((1, e**-reach, e**reach))


def test_a_comparison_takes_out_the_machine_and_the_noise():
    def runs(engine: tuple[float, ...], server: tuple[float, ...]) -> list[dict[str, object]]:
        rates = [("bare engine", one) for one in engine] + [("titopool", one) for one in server]
        return [
            {
                "target": target,
                "pattern": "batch",
                "num_tokens": rate,
                "elapsed_s": 1,
                "num_failures": 0,
            }
            for target, rate in rates
        ]

    old = rates_of(runs((100, 102), (90, 92)))
    # A machine of half the speed.
    same, slower = runs((50, 51), (45, 46)), runs((50, 51), (35, 36))
    assert compare(old, rates_of(same))[1].endswith(
        "of the engine 1.000 (0.936 to 1.069): within the noise"
    )
    assert compare(old, rates_of(slower))[1].endswith(": slower")
    assert compare(rates_of(slower), rates_of(same))[1].endswith(": faster")
    assert compare(old, rates_of(runs((50,), (45,))))[1].endswith("so its noise is unknown)")


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


def test_a_row_keeps_the_first_update_apart():
    runs = [
        {"total_s": total, "paused_s": total / 2, "staging": "kv", "gpu_bytes": size, "trainer_bytes": 7}
        for total, size in ((9.0, 90), (1.0, 10), (3.0, 30), (2.0, 20))
    ]  # fmt: skip
    row = row_of(runs, server="one")
    assert (row["first_s"], row["median_s"], row["worst_s"], row["paused_s"]) == (
        9.0,
        2.0,
        3.0,
        1.0,
    )
    assert (row["first_gpu_bytes"], row["gpu_bytes"], row["trainer_bytes"]) == (90, 30, 7)
    assert row_of([{"total_s": 1.0}], server="bare")["gpu_bytes"] is None


def test_fused_experts_are_sent_as_the_checkpoint_has_them(tmp_path: Path):
    folder = make_family("qwen3_moe", tmp_path / "model", 0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    sent = dict(checkpoint_tensors(dict(model.named_parameters())))
    expected = load_file(Path(folder) / "model.safetensors")
    assert sent.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())


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
