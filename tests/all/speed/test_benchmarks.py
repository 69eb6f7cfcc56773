"""The benchmarks report correct figures or end with an error."""

import json
import math
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks import everything, placement
from benchmarks.bare_groups import BareGroups
from benchmarks.bench import check_lengths
from benchmarks.compare import compare, rates_of, speeds_of
from benchmarks.engine_counts import Counts, mean_counts
from benchmarks.everything import bench_values, stream_values
from benchmarks.groups_tables import first_tokens_table, groups_table
from benchmarks.intervals import paired, unpaired
from benchmarks.oversubscription import PLANS, make_groups
from benchmarks.placement import simulate
from benchmarks.placement_workloads import fast_conversations
from benchmarks.report import rows_of
from benchmarks.stops import MOST_STOP_IDS, choose_stops
from benchmarks.streams import Stream, gaps_of, step_s
from benchmarks.targets import Titopool, VllmServe
from benchmarks.weights.table import row_of
from benchmarks.weights.trainer import checkpoint_tensors
from benchmarks.workload import Call, Sizes, make_pattern
from harness.servers import REPOSITORY
from tests.kit.models.model_families import make_family

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


def test_one_table_has_all_benchmarks_and_can_be_compared():
    def values(speed: float) -> dict[str, Any]:
        common = {"num_failures": 0, "elapsed_s": 2.0, "latencies_s": {"p50": 0.1 / speed}}
        runs = [
            {**common, "target": target, "pattern": pattern, "num_tokens": number * speed}
            for target, number in (("bare engine", 200), ("titopool, 1 worker, JSON", 100))
            for pattern in ("batch", "short")
            for _ in range(2)
        ]
        streams = [
            {"target": "titopool, 1 worker, JSON", "num_streams": 8, "is_streamed": is_streamed,
             "tokens_per_s": rate, "first_token_s": 0.01, "between_chunks_p99_s": 0.002, "between_chunks_p99_begun_s": 0.001}
            for is_streamed, rate in ((False, 40.0), (True, 30.0))
        ]  # fmt: skip
        found = [*bench_values({"sizes": asdict(SIZES), "runs": runs})]
        found += stream_values({"runs": streams})
        machine = {"date": "2026-11-25", "gpus": ["H100"], "num_cores": 2, "processor": ""}
        machine["versions"] = {"vllm": "0.33.0"}
        return {
            "machine": machine,
            "shape": "tiny",
            "commands": ["python -m a"],
            "values": [one._asdict() for one in found],
        }

    lines = everything.markdown(values(1.0)).splitlines()
    assert lines[0] == "2026-11-25, 1 x H100; 2 CPU cores; vllm 0.33.0"
    assert lines[2:4] == ["tiny:", "`python -m a`"]
    assert "| | bare engine | titopool |" in lines
    assert "| one request with 2 prompts: tok/s | 100 | 50 (0.50) |" in lines
    # The engine's limit of requests at once is one batch.
    assert "| 2 one-prompt requests at once: tok/s | 100 | – |" in lines
    assert "| 8 streams at once: of whole answers | – | 0.75 |" in lines
    assert "| 8 streams at once: between chunks, p99, ms | – | 2 |" in lines
    rows = compare(speeds_of(values(1.0)), speeds_of(values(2.0)))
    # Streams have no engine to compare with.
    first_token = "titopool", "8 streams at once: first token, ms"
    assert any(row.startswith(", ".join(first_token)) for row in rows)
    (slow,) = compare({first_token: [100.0, 101.0]}, {first_token: [50.0, 51.0]})
    assert slow.endswith(": slower")
    short = "titopool, one request at a time, 1 prompt, 8 tokens"
    assert (
        f"{short}: p50 ms: 2.000 (2.000 to 2.000), of the engine 1.000 (1.000 to 1.000): within the noise"
        in rows
    )


def test_gaps_and_steps_of_streams_count_from_when_all_have_begun():
    # The second stream begins at 3; a gap of 2 s comes before, where the engine processes prompts.
    first = Stream(0.0, [1.0, 3.0, 3.5, 4.0], [1, 1, 2, 2])
    second = Stream(0.0, [3.0, 3.5, 4.5], [1, 2, 2])
    assert gaps_of([first, second], since=0) == [2.0, 0.5, 0.5, 0.5, 1.0]
    assert gaps_of([first, second], since=3.0) == [0.5, 0.5, 0.5, 1.0]
    assert (step_s(first, 3.0), step_s(second, 3.0), step_s(first, 9.0)) == (0.25, 0.375, 0.0)


def test_repeats_use_different_prompts():
    first, second = (make_pattern("single", SIZES, repeat=number) for number in (0, 1))
    assert first.num_tokens == second.num_tokens == 6
    assert first.calls != second.calls


def test_more_groups_begin_with_the_lengths_of_fewer():
    plan = json.loads(PLANS.read_text())["tiny"]
    few, many = (make_groups(plan, number, repeat=1) for number in (16, 24))
    assert [one.lengths for one in few] == [one.lengths for one in many[:16]]
    assert not {tuple(one.ids) for one in few} & {tuple(one.ids) for one in many}


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


def test_stop_ids_end_a_uniform_model_after_the_mean():
    few, _ = choose_stops(2048, 50)
    assert 2048 / len(set(few["stop_token_ids"])) == pytest.approx(50, rel=0.01)
    assert all(0 <= one < 2048 for one in few["stop_token_ids"])
    assert len(choose_stops(2048, 2048 / MOST_STOP_IDS)[0]["stop_token_ids"]) == MOST_STOP_IDS
    biased, explained = choose_stops(151_936, 200)
    (bias,) = biased["logit_bias"].values()
    assert math.exp(bias) / (math.exp(bias) + 151_935) == pytest.approx(1 / 200)
    assert "needs 760 stop ids of 151,936; 96 are allowed" in explained


def test_all_targets_of_groups_get_the_same_stop_ids():
    sampling, _ = choose_stops(151_936, 200)
    call = Call([[1, 2]], n=4, sampling=sampling)
    bodies = [
        json.loads(Titopool(1).body(call, 9, "m"))["generation_kwargs"],
        json.loads(VllmServe().body(call, 9, "m")),
        json.loads(BareGroups().body_of_all([call], 0, 9))["sampling"],
    ]
    assert all(body[name] == sampling[name] for body in bodies for name in sampling)


def test_running_sequences_are_those_until_four_fifths_of_the_tokens():
    readings = [Counts(0, 100, 10), Counts(8, 140, 15), Counts(6, 180, 25), Counts(1, 199, 40)]
    readings.append(Counts(0, 200, 50))
    assert mean_counts(readings) == {"running": 7, "tokens_per_step": 2.5}
    assert mean_counts([readings[0], readings[-1]])["running"] is None


def test_tables_of_groups_have_ratios_of_one_round():
    def run(target: str, number: int, rate: float) -> dict[str, Any]:
        counted = {"mean_len": 50.0, "running": None, "tokens_per_step": 7.5}
        return {"pattern": "one request", "n": 8, "target": target, "round": number,
                "tokens_per_s": rate, **counted}  # fmt: skip

    result: dict[str, Any] = {
        "machine": {"date": "2026-11-25", "commit": "c", "gpus": ["H100"]}, "shape": "tiny", "slots": 8,
        "completions": 16, "max_tokens": 99, "input_len": 4, "stop": "stops", "n": [8], "front_ends": 2,
        "patterns": ["one request"],
        # The second round runs in the other order.
        "runs": [run("titopool", 0, 50), run("vllm serve", 0, 100), run("vllm serve", 1, 10),
                 run("titopool", 1, 20)],
    }  # fmt: skip
    row = "| n=8, titopool | 35 (50, 20) | 50.0 | – | 7.5 | – | 1.25 (0.50, 2.00) |"
    assert row in groups_table(result).splitlines()
    common = {"target": "titopool", "p50_s": 0.01, "num_requests": 9, "step_s": 0.01}
    result["runs"] = [
        {**common, "beside": "nothing", "p99_s": 0.02, "num_late": 0},
        {**common, "beside": "1 of n=8", "p99_s": 0.05, "num_late": 1},
    ]
    row = "| titopool beside 1 of n=8 | 10.0 | ≥ 50.0 | 9, 1 late | 10.0 | 3.0 |"
    assert row in first_tokens_table(result).splitlines()


@pytest.mark.server
def test_bench_groups_runs(tmp_path: Path):
    options = ["--n", "4", "--completions", "16", "--rounds", "1", "--slots", "8", "--mean", "8",
               "--max-tokens", "32"]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "benchmarks.groups", *options, "--out", str(tmp_path / "groups")],
        cwd=REPOSITORY, check=True, timeout=300, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    runs = json.loads((tmp_path / "groups.json").read_text())["runs"]
    assert [(run["pattern"], run["target"]) for run in runs] == [
        (pattern, target)
        for pattern in ("one request", "clients")
        for target in ("bare engine", "titopool", "vllm serve")
    ]
    # Sixteen lengths of a geometric distribution have a mean of 8 with a deviation of 2.
    assert all(2 < run["mean_len"] < 20 and run["tokens_per_step"] > 1 for run in runs)


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


def test_in_the_simulation_fast_turns_find_their_prefixes_through_any_front_end():
    conversed = fast_conversations(random.Random(1), 1)[:24]
    cached = {
        name: simulate(conversed, name, num_workers=2, num_front_ends=4)["hit_rate"]
        for name in placement.NAMES
    }
    assert (
        cached["even_split"]
        > cached["prefix"]
        > 0.9 * cached["even_split"]
        > cached["least_loaded"]
    )
