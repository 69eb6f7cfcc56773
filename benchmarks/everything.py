"""All comparisons of `make bench` in one table: `python -m benchmarks.everything --out OUT [--shape SHAPE]`.

Runs `benchmarks.bench`, `.streams`, `.conversations`, `.images` and `.front` one after the other, each
with its peers in the same run. Keeps each one's files as `OUT-NAME`, all measured values as `OUT.json`
for `benchmarks.compare`, and their means as a table in `OUT.md`. A benchmark that fails is named at the
end, which then ends with 1; the others run.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import describe_machine
from benchmarks.report import BARE, LIMIT_OF, title_of
from benchmarks.targets import VLLM_SERVERS, TrlServe
from benchmarks.workload import Sizes, describe

# Of one benchmark with all its servers.
TIMEOUT_S = 3 * 3600
TITOPOOL = "titopool"
# Ends of the rows of which more is better.
RATES = ("/s", "of whole answers", "in the prefix cache")


class Value(NamedTuple):
    """One measured value."""

    row: str
    target: str
    value: float


def main() -> None:
    options = parse_arguments()
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    failed, commands = [], []
    for name in options.parts:
        words = [*WORDS_OF_SHAPE[options.shape].get(name, []), *WORDS.get(name, [])]
        if name == "bench" and options.trl:
            words += ["--trl", options.trl]
        command = [sys.executable, "-m", f"benchmarks.{name}", "--out", f"{out}-{name}", *words]
        commands.append(shlex.join(["python", *command[1:]]))
        print(commands[-1], flush=True)
        if not has_succeeded(command):
            failed.append(name)
    result = {
        "machine": describe_machine(), "shape": options.shape, "commands": commands, "values": [],
    }  # fmt: skip
    for name in options.parts:
        if name not in failed:
            part = json.loads(Path(f"{out}-{name}.json").read_text())
            result["values"] += [one._asdict() for one in VALUES[name](part)]
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    if failed:
        sys.exit(f"these benchmarks failed, and their output is above: {', '.join(failed)}")


def has_succeeded(command: Sequence[str]) -> bool:
    """Runs a benchmark; ends it with its servers after `TIMEOUT_S`."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=WORDS_OF_SHAPE, default="tiny")
    parser.add_argument("--parts", nargs="+", choices=VALUES, help="default: those of the shape")
    parser.add_argument("--trl", metavar="FOLDER", help="folder with the package trl 1.9.2")
    parser.add_argument("--out", default="bench", help="path of the files, without extension")
    options = parser.parse_args()
    known = {**VALUES} if options.shape == "tiny" else {**WORDS, **WORDS_OF_SHAPE[options.shape]}
    options.parts = options.parts or [name for name in VALUES if name in known]
    return options


WORDS = {"front": ["--num-front-ends", "1", "--num-clients", "16", "256", "--answers", "JSON"]}
SIZES_06B = ["--shape", "qwen3-0.6b", "--input-len", "256", "--output-len", "256"]
SIZES_8B = [*SIZES_06B[2:], "--shape", "qwen3-8b", "--dummy-weights"]
# Peers in each of their forms, some of which need a GPU, in patterns that take 15 minutes for all.
PEERS = [
    "--targets", "bare", "titopool", *VLLM_SERVERS, "trl",
    "--patterns", "batch", "single", "queue", "groups", "short", "--repeats", "2",
]  # fmt: skip
STREAM_PEERS = ["--targets", "titopool", *VLLM_SERVERS]
# Options of each benchmark: what a machine without a GPU does in half an hour, and one H200.
WORDS_OF_SHAPE: dict[str, dict[str, list[str]]] = {
    "tiny": {
        "streams": ["--num-streams", "64", "--output-len", "128", "--num-clients", "2"],
        "conversations": ["--repeats", "3"],
    },
    "qwen3-0.6b": {
        "bench": [*SIZES_06B, "--num-prompts", "512", *PEERS],
        "streams": [*SIZES_06B, "--num-streams", "64", "256", "1024", "--repeats", "1",
                    *STREAM_PEERS],
        "conversations": ["--shape", "qwen3-0.6b", "--repeats", "3"],
        "images": ["--shape", "qwen2.5-vl-3b", "--num-images", "128", "--image-processes", "8"],
    },
    "qwen3-8b": {
        "bench": [*SIZES_8B, "--num-prompts", "256", *PEERS],
        "streams": [*SIZES_8B[:-1], "--num-streams", "64", "256", "--repeats", "1", *STREAM_PEERS],
    },
}  # fmt: skip


def bench_values(result: dict[str, Any]) -> Iterator[Value]:
    """Completion tokens a second in each pattern, and the latency of a short request."""
    sizes = Sizes(**result["sizes"])
    for run in result["runs"]:
        target, pattern = _short(run["target"]), run["pattern"]
        if run["num_failures"]:
            yield Value(f"{describe(pattern, sizes)}: failed requests", target, run["num_failures"])
            continue
        # The engine's limit of a pattern may be another one.
        limited = [one for one, limit in LIMIT_OF.items() if limit == pattern and target == BARE]
        for title in (describe(one, sizes) for one in (pattern, *limited)):
            yield Value(f"{title}: tok/s", target, run["num_tokens"] / run["elapsed_s"])
        if pattern == "short":
            title = describe(pattern, sizes)
            yield Value(f"{title}: p50 ms", target, 1e3 * run["latencies_s"]["p50"])


def stream_values(result: dict[str, Any]) -> Iterator[Value]:
    """Streams: tokens a second and their ratio to whole answers, and times in ms."""
    whole: dict[tuple[str, int], float] = {}
    for run in result["runs"]:
        target = _short(run["target"])
        key = target, run["num_streams"]
        if not run["is_streamed"]:
            whole[key] = run["tokens_per_s"]
            continue
        title = f"{run['num_streams']} streams at once"
        yield Value(f"{title}: tok/s", target, run["tokens_per_s"])
        yield Value(f"{title}: of whole answers", target, run["tokens_per_s"] / whole[key])
        yield Value(f"{title}: first token, ms", target, 1e3 * run["first_token_s"])
        gaps_s = {"": "between_chunks_p99_s", ", all begun": "between_chunks_p99_begun_s"}
        for part, key in gaps_s.items():
            if key in run:
                yield Value(f"{title}: between chunks{part}, p99, ms", target, 1e3 * run[key])


def conversation_values(result: dict[str, Any]) -> Iterator[Value]:
    """Conversations: tokens a second, and the share of prompts that prefix caches had."""
    plan = result["plan"]
    title = f"{plan['conversations']} conversations"
    for run in result["runs"]:
        target = BARE if run["target"] == "bare engines" else run["target"]
        yield Value(f"{title}: tok/s", target, run["tokens_per_s"])
        yield Value(f"{title}: in the prefix cache", target, run["cached"])


def image_values(result: dict[str, Any]) -> Iterator[Value]:
    """Images a second, and the latency of text beside them."""
    title = f"{result['num_images']} images in one request"
    for run in result["runs"]:
        yield Value(f"{title}: images/s", BARE, run["bare_images_per_s"])
        yield Value(f"{title}: images/s", TITOPOOL, run["images_per_s"])
        for name, key in (("alone", "text_alone"), ("with images", "text_beside")):
            yield Value(f"text {name}: p99 ms", TITOPOOL, 1e3 * run[key]["p99_s"])


def front_values(result: dict[str, Any]) -> Iterator[Value]:
    """CPU time of the front end, with engines that answer at once."""
    for run in result["runs"]:
        cpu_us = 1e6 * run["front_end_cpu_s"]
        title = f"front end alone, {run['num_clients']} clients, {run['num_prompts']} prompts each"
        if run["num_prompts"] == 1:
            yield Value(f"{title}: CPU µs a request", TITOPOOL, cpu_us / run["num_calls"])
        else:
            yield Value(f"{title}: CPU µs a token", TITOPOOL, cpu_us / run["num_tokens"])


VALUES: dict[str, Callable[[dict[str, Any]], Iterator[Value]]] = {
    "bench": bench_values,
    "streams": stream_values,
    "conversations": conversation_values,
    "images": image_values,
    "front": front_values,
}


def markdown(result: dict[str, Any]) -> str:
    """A row for each measure, a column for each target: means, and in brackets the ratio to the engine."""
    values = [Value(**one) for one in result["values"]]
    targets = sorted({one.target for one in values}, key=_order)
    lines = [
        title_of(result["machine"]), "",
        f"{result['shape']}:", *(f"`{command}`" for command in result["commands"]), "",
        f"| | {' | '.join(targets)} |", "|---" * (len(targets) + 1) + "|",
    ]  # fmt: skip
    for row in dict.fromkeys(one.row for one in values):
        means = {name: _mean(values, row, name) for name in targets}
        limit = means.get(BARE) if row.endswith("/s") else None
        cells = [_cell(means[name], None if name == BARE else limit) for name in targets]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(target: str) -> str:
    """A target's name without what is the same for all."""
    name = target.replace(", 1 worker", "").replace(", JSON", "")
    return f"{name} ({TrlServe.max_calls} requests at most)" if name == TrlServe.name else name


def _order(target: str) -> tuple[int, str]:
    """The engine first, then this server."""
    return (0 if target == BARE else 1 if target.startswith(TITOPOOL) else 2, target)


def _mean(values: Sequence[Value], row: str, target: str) -> float | None:
    found = [one.value for one in values if (one.row, one.target) == (row, target)]
    return statistics.mean(found) if found else None


def _cell(mean: float | None, limit: float | None) -> str:
    if mean is None:
        return "–"
    shown = f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
    return f"{shown} ({mean / limit:.2f})" if limit else shown


if __name__ == "__main__":
    main()
