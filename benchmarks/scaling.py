"""Several workers beside one: whole answers, groups with long tails, streams, and a worker that is killed.

    python -m benchmarks.scaling --shape qwen3-8b --num-workers 1 2 4         # four GPUs
    python -m benchmarks.scaling --num-workers 1 2 --patterns batch streams   # tiny Qwen3, any machine

A server with w workers gets w times the prompts, at w times as many requests at once; its part of
linear is its tokens a second through w times those of the server with one worker of the same call.
With `--peer`, `vllm serve` with as many engines (`--data-parallel-size`) and four API servers follows
each. With `--kill`, a worker is killed while requests run: all must end with 200, and the seconds
until it is ready again are those under this load. Patterns are those of `benchmarks.bench`; "tails":
64 w clients with groups of 8 whose lengths are geometric (`benchmarks.groups`); "streams": 64 w at
once (`benchmarks.streams`). Writes `OUT.json`, prints a table.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import groups, streams
from benchmarks.bench import make_engine, measure_once, say
from benchmarks.groups import CLIENTS, Cell, CountedVllmServe
from benchmarks.load import send
from benchmarks.machine import describe_machine
from benchmarks.models import SHAPES
from benchmarks.processes import Running, engine_environment, running
from benchmarks.stops import choose_stops
from benchmarks.targets import Engine, Titopool, VllmServe
from benchmarks.workload import PATTERNS, Sizes, make_pattern
from harness.servers import Server, wait_until, worker_pids
from titopool import demo_model
from titopool.settings.gpus import visible_gpus

TAILS, STREAMS = "tails", "streams"
GROUP_SIZE, TAIL_CLIENTS, NUM_STREAMS = 8, 64, 64
# How long the requests beside a kill run before it, and how long a start may take.
BEFORE_KILL_S, READY_S = 2.0, 300.0


def main() -> None:
    options = parse_arguments()
    # vLLM's engines outlive a killed parent.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    on_cpu = not visible_gpus()
    vocab_size = SHAPES[options.shape].get("vocab_size", demo_model.VOCAB_SIZE)
    options.sampling, explained = choose_stops(vocab_size, options.mean)
    result: dict[str, Any] = {
        "machine": describe_machine(), **vars(options), "stop": explained, "runs": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        longest = options.input_len + max(options.output_len, options.max_tokens)
        engine = make_engine(options, folder, on_cpu=on_cpu, max_model_len=longest)
        for target in targets(options):
            environ = engine_environment(on_cpu=on_cpu, num_workers=target.num_workers)
            with running(target, engine, environ, folder / "log") as server:
                say(f"{target.name} is ready after {server.start_s:.0f} s")
                for run in runs_of(server, target, engine, options):
                    run |= {"target": target.name, "num_workers": target.num_workers}
                    result["runs"].append(run)
                    say(json.dumps(run))
                    Path(f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def parse_arguments() -> argparse.Namespace:
    on_cpu = not visible_gpus()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--patterns", nargs="+", choices=(*PATTERNS, TAILS, STREAMS),
                        default=["batch", "queue", TAILS, STREAMS])  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=16 if on_cpu else 256, help="a worker")
    parser.add_argument("--input-len", type=int, default=32 if on_cpu else 256)
    parser.add_argument("--output-len", type=int, default=32 if on_cpu else 256)
    parser.add_argument("--mean", type=float, default=20 if on_cpu else 200, help="of the tails")
    parser.add_argument("--max-tokens", type=int, default=100 if on_cpu else 1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--serve-options", default="", help="further options of this server")
    parser.add_argument("--out", default="bench-scaling", help="path without extension")
    options = parser.parse_args()
    # What `make_engine` and the patterns' own benchmarks read.
    options.dummy_weights, options.max_num_seqs = options.shape != "tiny", 0
    options.completions, options.clients = options.num_prompts * GROUP_SIZE, TAIL_CLIENTS
    options.num_clients = min(16, os.cpu_count() or 1)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    return options


def targets(options: argparse.Namespace) -> Iterator[Titopool | VllmServe]:
    for num_workers in options.num_workers:
        yield Titopool(num_workers, options=options.serve_options.split())
        if options.peer:
            yield CountedVllmServe(num_api_servers=4, num_engines=num_workers)


def runs_of(
    server: Running, target: Titopool | VllmServe, engine: Engine, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    num_workers = target.num_workers
    sizes = Sizes(options.num_prompts * num_workers, options.input_len, options.output_len)
    scaled = argparse.Namespace(**vars(options))
    scaled.completions *= num_workers
    scaled.clients *= num_workers
    # The first round warms up, without what takes longest: front ends load tokenizers for streams.
    first = [name for name in options.patterns if name in ("batch", STREAMS)]
    for repeat in range(-1, options.repeats):
        for name in options.patterns if repeat >= 0 else first:
            if name == TAILS:
                cell = Cell(CLIENTS, GROUP_SIZE)
                found = groups.measure(server, cell, engine.model, scaled, key=str(repeat))
            elif name == STREAMS:
                found = streams.measure(server, NUM_STREAMS * num_workers, options, True)
            else:
                run = measure_once(server, target, make_pattern(name, sizes, repeat=repeat), engine)
                if run["num_failures"]:
                    sys.exit(f"{target.name}, {name}: {run['num_failures']} requests failed")
                found = {**run, "tokens_per_s": run["num_tokens"] / run["elapsed_s"]}
            if repeat >= 0:
                yield {**found, "pattern": name}
    if options.kill and isinstance(target, Titopool):
        yield kill_under_load(server, target, engine, sizes)


def kill_under_load(
    server: Running, target: Titopool, engine: Engine, sizes: Sizes
) -> dict[str, Any]:
    """Kills the first worker beside as many requests as keep it busy until it is back."""
    wide = replace(sizes, num_prompts=4 * sizes.num_prompts)
    pattern = make_pattern("queue", wide, repeat=-2)
    bodies = [target.body(call, pattern.output_len, engine.model) for call in pattern.calls]
    url = f"{server.url}{target.path_of(pattern.calls[0])}"
    own = Server(server.process, server.url, Path(os.devnull), target.num_workers)  # type: ignore[arg-type]
    num_ready = lambda: own.get("/ready").json()["num_ready"]  # noqa: E731
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(
            send, url, bodies, concurrency=pattern.concurrency // 4, headers=target.headers
        )
        time.sleep(BEFORE_KILL_S)
        began_s = time.monotonic()
        os.kill(worker_pids(own)[0], signal.SIGKILL)
        for wanted in (target.num_workers - 1, target.num_workers):
            wait_until(lambda wanted=wanted: num_ready() == wanted, READY_S)
        again_s = time.monotonic() - began_s
        was_busy = not sending.done()
        sent = sending.result()
    if failed := [one for one in sent.statuses if one != 200]:
        sys.exit(
            f"{target.name}: {len(failed)} of {len(bodies)} requests failed beside a killed worker"
        )
    return {
        "pattern": "killed", "ready_again_s": again_s,
        "num_calls": len(bodies), "was_busy_until_ready": was_busy,
        "tokens_per_s": pattern.num_tokens / sent.elapsed_s,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """A row for each pattern, a column for each server: tokens a second and the part of linear."""
    machine = result["machine"]
    runs = result["runs"]
    names = list(dict.fromkeys(run["target"] for run in runs))
    where = ", ".join(machine["gpus"]) or f"{machine['num_cores']} cores of {machine['processor']}"
    lines = [
        f"{machine['date']}, {machine['commit']}, {where}; {result['shape']}, "
        f"{asdict(Sizes(result['num_prompts'], result['input_len'], result['output_len']))}",
        "", f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|",
    ]  # fmt: skip
    for pattern in dict.fromkeys(run["pattern"] for run in runs if run["pattern"] != "killed"):
        rates: dict[str, list[float]] = {name: [] for name in names}
        for run in runs:
            if run["pattern"] == pattern:
                rates[run["target"]].append(run["tokens_per_s"])
        cells = [cell(rates, name, runs) for name in names]
        lines.append(f"| {pattern} | {' | '.join(cells)} |")
    for run in runs:
        if run["pattern"] == "killed":
            busy = "all the time" if run["was_busy_until_ready"] else "not until then"
            lines.append(
                f"\n{run['target']}: the killed worker is ready again after "
                f"{run['ready_again_s']:.1f} s (requests ran {busy}), {run['num_calls']} requests "
                f"were answered, {run['tokens_per_s']:,.0f} tok/s"
            )
    return "\n".join(lines)


def cell(rates: dict[str, list[float]], name: str, runs: list[dict[str, Any]]) -> str:
    if not rates[name]:
        return "–"
    sizes = {run["target"]: run["num_workers"] for run in runs}
    kind = name.partition(",")[0]
    one = [
        found
        for other, found in rates.items()
        if sizes[other] == 1 and other.startswith(kind) and found
    ]
    shown = f"{median(rates[name]):,.0f}"
    if sizes[name] == 1 or not one:
        return shown
    return f"{shown}; {median(rates[name]) / (sizes[name] * median(one[0])):.2f}"


if __name__ == "__main__":
    main()
