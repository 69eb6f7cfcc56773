"""Compares this server with the bare engine, vLLM's server and TRL's server on one machine.

    python -m benchmarks.bench                              # tiny model, any machine
    python -m benchmarks.bench --shape qwen3-0.6b --num-workers 1 2 4 --trl FOLDER

Each target starts with the same model folder and engine options, gets the same prompts in the same
patterns, and stops before the next target starts. A server with w workers gets w times the prompts;
its ratio is to w engines. The results go to `OUT.json`, `OUT.md` and `OUT.png`. If a run returns
other numbers of tokens than requested, the benchmark ends with an error.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.bare_engine import FLAT
from benchmarks.load import send
from benchmarks.machine import describe_machine
from benchmarks.processes import Running, engine_environment, running
from benchmarks.targets import (
    VLLM_SERVERS,
    Engine,
    Inference,
    Target,
    Titopool,
    TrlServe,
    WrongAnswer,
)
from benchmarks.workload import PATTERNS, Pattern, Sizes, make_pattern

BARE_TIMEOUT_S = 1200
TARGETS = ("bare", "titopool", "binary", "inference", "experts", *VLLM_SERVERS, "trl")
# The others need a mixture of experts and vLLM's capture of its routing, or a GPU.
DEFAULT_TARGETS = ("bare", "titopool", "binary", "vllm", "trl")


def main() -> None:
    options = parse_arguments()
    from titopool.settings.gpus import visible_gpus

    on_cpu = not visible_gpus()
    sizes = Sizes(
        options.num_prompts, options.input_len, options.output_len,
        options.long_input_len, options.long_output_len,
    )  # fmt: skip
    out = Path(options.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = make_engine(options, folder, on_cpu=on_cpu, max_model_len=longest(sizes))
        result: dict[str, Any] = {
            "machine": describe_machine(),
            "shape": options.shape,
            "sizes": asdict(sizes),
            "engine_options": dict(engine.options),
            "repeats": options.repeats * options.rounds,
            "runs": [],
        }
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            if "bare" in options.targets:
                result["runs"] += measure_bare_engine(engine, sizes, options, folder, on_cpu=on_cpu)
            for same_server in chosen_targets(options):
                first = same_server[0]
                environ = engine_environment(on_cpu=on_cpu, num_workers=first.num_workers)
                with running(first, engine, environ, folder / "log") as server:
                    result["runs"] += measure(server, same_server, engine, sizes, options)
                # Keeps the results so far, also if the next server fails.
                report.save(result, out)
    report.write(result, out)


def parse_arguments() -> argparse.Namespace:
    from benchmarks.models import SHAPES

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[1])
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--long-input-len", type=int, default=1024, help="of long prompts")
    parser.add_argument("--long-output-len", type=int, default=512, help="of long answers")
    parser.add_argument("--max-num-seqs", type=int, default=0, help="0: twice the prompts")
    parser.add_argument(
        "--dummy-weights", action="store_true", help="write no weights; vLLM makes random ones"
    )
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(DEFAULT_TARGETS))
    parser.add_argument(
        "--flat", action="store_true", help="also measure LLM.generate with flat_logprobs"
    )
    parser.add_argument("--trl", metavar="FOLDER", help="folder with the package trl 1.9.2")
    parser.add_argument("--serve-options", default="", help="further options of titopool serve")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each pattern per start")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each server")
    parser.add_argument(
        "--out", default="bench", help="path of the result files, without extension"
    )
    return parser.parse_args()


def chosen_targets(options: argparse.Namespace) -> list[list[Target]]:
    """The targets. Targets in one list share one server and differ in their requests."""
    targets: list[list[Target]] = []
    kinds = [name for name in ("titopool", "binary") if name in options.targets]
    words = options.serve_options.split()
    for num_workers in options.num_workers if kinds else ():
        targets.append(
            [Titopool(num_workers, binary=kind == "binary", options=words) for kind in kinds]
        )
    targets += [
        [Inference(num_workers, with_experts=name == "experts", options=words)]
        for name in ("inference", "experts") if name in options.targets
        for num_workers in options.num_workers
    ]  # fmt: skip
    targets += [[server] for name, server in VLLM_SERVERS.items() if name in options.targets]
    if "trl" in options.targets and options.trl:
        targets.append([TrlServe(options.trl)])
    return targets


def longest(sizes: Sizes) -> int:
    """The context that all patterns need."""
    return max(sizes.input_len, sizes.long_input_len) + max(sizes.output_len, sizes.long_output_len)


def make_engine(
    options: argparse.Namespace, folder: Path, *, on_cpu: bool, max_model_len: int = 2048
) -> Engine:
    model = folder / "model"
    weights = "dummy" if options.dummy_weights else "weights"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.models", options.shape, str(model), weights],
        check=True, timeout=600,
    )  # fmt: skip
    chosen: dict[str, Any] = {"max_model_len": max_model_len, "logprobs_mode": "processed_logprobs"}
    # As many as the pattern "queue" has in flight, so that the bare engine runs no more.
    chosen["max_num_seqs"] = options.max_num_seqs or 2 * options.num_prompts
    if options.shape == "tiny":
        chosen["dtype"] = "float32"
    if options.dummy_weights and options.shape != "tiny":
        chosen["load_format"] = "dummy"
    if on_cpu:
        # This server's defaults on a CPU, also for the other servers.
        chosen |= {"enforce_eager": True, "gpu_memory_utilization": 0.4}
        chosen["distributed_executor_backend"] = "uni"
    else:
        # This server's default, too. vLLM's default of 512 is slower from the 513th sequence on.
        chosen["max_cudagraph_capture_size"] = chosen["max_num_seqs"]
    return Engine(str(model), chosen)


def measure_bare_engine(
    engine: Engine, sizes: Sizes, options: argparse.Namespace, folder: Path, *, on_cpu: bool
) -> list[dict[str, Any]]:
    job = {
        "model": engine.model, "options": dict(engine.options), "sizes": asdict(sizes),
        "patterns": [name for name in options.patterns if name != "single"],
        "repeats": options.repeats, "kinds": ["", FLAT] if options.flat else [""],
    }  # fmt: skip
    job_file, answer_file, log = folder / "job.json", folder / "answer.json", folder / "bare.log"
    job_file.write_text(json.dumps(job))
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.bare_engine", str(job_file), str(answer_file)],
            env=engine_environment(on_cpu=on_cpu), stdout=output, stderr=subprocess.STDOUT,
            timeout=BARE_TIMEOUT_S, check=False,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"the bare engine failed; its log ends:\n{log.read_text()[-6000:]}")
    answer = json.loads(answer_file.read_text())
    return [
        {
            "target": "bare engine" + run["kind"], "num_workers": 1, "start_s": answer["start_s"],
            "pattern": run["pattern"], "num_calls": 0, "num_failures": 0,
            "num_tokens": run["num_tokens"], "elapsed_s": run["elapsed_s"],
            "latencies_s": quantiles(run["latencies_s"]),
            "cpu_s": {"workers": run["cpu_s"], "front_end": 0.0}, "num_bytes": 0,
        }
        for run in answer["runs"]
    ]  # fmt: skip


def measure(
    server: Running,
    targets: list[Target],
    engine: Engine,
    sizes: Sizes,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Runs that warm up, then all patterns, `repeats` times in turn."""
    num_prompts = sizes.num_prompts * targets[0].num_workers
    scaled = replace(sizes, num_prompts=num_prompts)
    warm_up(server, targets[0], scaled, engine)
    runs = []
    for repeat in range(options.repeats):
        for name in options.patterns:
            for index, target in enumerate(targets):
                # New prompts for each target, so that the second finds none in the prefix cache.
                number = repeat * len(targets) + index
                pattern = for_target(make_pattern(name, scaled, repeat=number), target)
                if target.path_of(pattern.calls[0]) is None:
                    continue
                run = measure_once(server, target, pattern, engine)
                runs.append(run)
                rate = run["num_tokens"] / run["elapsed_s"]
                say(f"{target.name}, {name}: {rate:,.0f} tok/s {run['jobs_by_worker'] or ''}")
    return runs


def warm_up(server: Running, target: Target, sizes: Sizes, engine: Engine) -> None:
    """One run of a batch, and one call to each other route: a route may load a tokenizer."""
    patterns = [for_target(make_pattern(name, sizes, repeat=-1), target) for name in PATTERNS]
    by_route = {target.path_of(one.calls[0]): one for one in reversed(patterns)}
    for route, pattern in by_route.items():
        if route and pattern.name != "batch":
            measure_once(server, target, replace(pattern, calls=pattern.calls[:1]), engine)
    measure_once(server, target, patterns[0], engine)


def for_target(pattern: Pattern, target: Target) -> Pattern:
    """The pattern as the server takes it: one prompt a request, or fewer requests."""
    if not target.takes_batches:
        calls = [replace(call, prompts=[one]) for call in pattern.calls for one in call.prompts]
        concurrency = pattern.concurrency * len(calls) // len(pattern.calls)
        return Pattern(pattern.name, calls, concurrency, pattern.output_len)
    if target.max_calls is None:
        return pattern
    calls = pattern.calls[: target.max_calls]
    return Pattern(pattern.name, calls, min(pattern.concurrency, len(calls)), pattern.output_len)


def measure_once(
    server: Running, target: Target, pattern: Pattern, engine: Engine
) -> dict[str, Any]:
    bodies = [target.body(call, pattern.output_len, engine.model) for call in pattern.calls]
    jobs_before = server.jobs_by_worker()
    server.forget_peak()
    peak_before = server.peak_bytes()
    before = server.cpu_s()
    sent = send(
        f"{server.url}{target.path_of(pattern.calls[0])}", bodies,
        concurrency=pattern.concurrency, headers=target.headers,
    )  # fmt: skip
    cpu_s = {role: used - before[role] for role, used in server.cpu_s().items()}
    good = [
        answer for status, answer in zip(sent.statuses, sent.answers, strict=True) if status == 200
    ]
    failures = [
        (status, answer)
        for status, answer in zip(sent.statuses, sent.answers, strict=True)
        if status != 200
    ]
    if failures:
        say(f"  {len(failures)} requests failed, the first with {failures[0]}"[:500])
    check_lengths(target, pattern, good, num_expected=len(pattern.calls) - len(failures))
    return {
        "target": target.name, "num_workers": target.num_workers, "start_s": server.start_s,
        "pattern": pattern.name, "num_calls": len(pattern.calls), "num_failures": len(failures),
        "num_tokens": pattern.num_tokens, "elapsed_s": sent.elapsed_s,
        "latencies_s": quantiles(sent.latencies_s), "cpu_s": cpu_s,
        "num_bytes": sum(map(len, good)),
        "front_end_bytes": server.peak_bytes() - peak_before,
        "jobs_by_worker": [
            after - before
            for after, before in zip(server.jobs_by_worker(), jobs_before, strict=True)
        ],
    }  # fmt: skip


def check_lengths(
    target: Target, pattern: Pattern, answers: list[bytes], num_expected: int
) -> None:
    """Ends the benchmark if a successful response has other lengths than requested."""
    per_call = len(pattern.calls[0].prompts) * pattern.calls[0].n
    wanted = [pattern.output_len] * (per_call * num_expected)
    try:
        found = [length for answer in answers for length in target.lengths(answer)]
    except (WrongAnswer, LookupError, TypeError, ValueError) as error:
        sys.exit(f"{target.name}, {pattern.name}: not reported: a response is malformed: {error!r}")
    if found != wanted:
        sys.exit(
            f"{target.name}, {pattern.name}: not reported: expected {len(wanted)} completions of "
            f"{pattern.output_len} tokens, got {len(found)} of {sorted(set(found))}"
        )


def quantiles(latencies_s: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(latencies_s)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": ordered[-1],
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
