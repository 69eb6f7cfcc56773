"""Groups whose answers differ in length: this server, vLLM's and the bare engine.

    python -m benchmarks.groups                                             # tiny Qwen3, any machine
    python -m benchmarks.groups --shape qwen3-0.6b --n 8 --rounds 1         # all servers, one n
    python -m benchmarks.groups --first-tokens      # small requests beside wide ones, see `first_tokens`

Each row has the same number of completions, in groups of n. All targets get the same new prompts and
the same stop ids, which end a completion of a random model at each token with the same probability.
So lengths are geometric; they are random (no seed), and each row has the mean that came. Patterns: one
request of all groups, and clients that each send one group after another. The bare engine takes the
second one as `benchmarks/bare_groups.py` says. A round is one run of each target, in alternating order.

Beside the tokens a second stands what the engine itself counts. "Running" is vLLM's
`num_requests_running`, read from /metrics four times a second and averaged until 80 % of the tokens
are there; this server's workers send it every 2 s, so short runs have few values. "Tokens a step" are
all completion tokens through all engine steps, so it counts the last, emptier part too. `vllm serve`
keeps its log statistics for that, as it does by default.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import first_tokens
from benchmarks.bare_groups import BareGroups
from benchmarks.bench import make_engine, say
from benchmarks.engine_counts import mean_counts, watched
from benchmarks.groups_tables import BARE, TARGETS, TITOPOOL, VLLM, VLLM_4, groups_table
from benchmarks.load import send
from benchmarks.machine import describe_machine
from benchmarks.models import PROMPT_IDS, SHAPES
from benchmarks.processes import Running, engine_environment, running
from benchmarks.stops import choose_stops
from benchmarks.targets import Engine, Titopool, VllmServe
from benchmarks.workload import Call
from titopool import demo_model
from titopool.settings.gpus import visible_gpus

ONE, CLIENTS = "one request", "clients"


class Cell(NamedTuple):
    """A row of the table for each target."""

    pattern: str
    n: int


class CountedVllmServe(VllmServe):
    """With vLLM's metrics, and without its limit on prompts of a request."""

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        words, variables = super().command(engine, port)
        words.remove("--disable-log-stats")
        return words, {**variables, "VLLM_MAX_COMPLETION_PROMPTS": str(2**20)}


def main() -> None:
    options = parse_arguments()
    # A benchmark that is ended stops its servers, too: vLLM's engines outlive a killed parent.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    vocab_size = SHAPES[options.shape].get("vocab_size", demo_model.VOCAB_SIZE)
    options.sampling, explained = choose_stops(vocab_size, options.mean)
    say(explained)
    result: dict[str, Any] = {
        "machine": describe_machine(), **vars(options), "stop": explained, "runs": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = Servers(options, Path(name), stack)
        if options.first_tokens:
            first_tokens.measure_all(servers, result)
            return
        for cell, number, target in servers.runs():
            server = servers.get(target)
            run = {**cell._asdict(), "target": target, "round": number}
            run |= measure(server, cell, servers.engine.model, options, key=str(number))
            result["runs"].append(run)
            say(json.dumps(run))
            Path(f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    table = groups_table(result)
    Path(f"{options.out}.md").write_text(table)
    print(table)


def parse_arguments() -> argparse.Namespace:
    on_cpu = not visible_gpus()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--slots", type=int, default=32 if on_cpu else 256, help="max_num_seqs")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    parser.add_argument("--completions", type=int, default=256 if on_cpu else 4096)
    parser.add_argument("--mean", type=float, default=50 if on_cpu else 200, help="in tokens")
    parser.add_argument("--max-tokens", type=int, default=400 if on_cpu else 1024)
    parser.add_argument("--input-len", type=int, default=32 if on_cpu else 256)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--patterns", nargs="+", choices=(ONE, CLIENTS), default=[ONE, CLIENTS])
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, help="default: without the last, which needs a GPU"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--apart", action="store_true",
        help="one server at a time, started for each round, if the memory does not hold all",
    )  # fmt: skip
    parser.add_argument("--front-ends", type=int, default=0, help="of this server; 0: its default")
    parser.add_argument("--serve-options", default="", help="further options of this server")
    parser.add_argument("--first-tokens", action="store_true", help="of small requests beside wide")
    parser.add_argument("--seconds", type=float, default=15, help="of a row of --first-tokens")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=first_tokens.WIDTHS, help="n of a wide request"
    )
    parser.add_argument(
        "--many", type=int, default=first_tokens.MANY, help="prompts of a wide request, or 0"
    )
    parser.add_argument("--out", default="bench-groups", help="path without extension")
    options = parser.parse_args()
    if any(options.completions % n for n in options.n):
        parser.error(f"--completions: expected a multiple of each n, got {options.completions}")
    if options.first_tokens:
        options.targets = [one for one in options.targets or [TITOPOOL] if one != BARE]
        options.front_ends = options.front_ends or 2
        # One front end may get all four requests of many prompts.
        options.serve_options += " --max-queued-prompts 1048576"
    options.targets = options.targets or [BARE, TITOPOOL, VLLM]
    # What `make_engine` reads.
    options.dummy_weights, options.num_prompts = options.shape != "tiny", options.slots
    options.max_num_seqs = options.slots
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    return options


class Servers:
    """Starts the targets: all of them until the end, or one at a time."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack):
        self.options, self._folder, self._stack = options, folder, stack
        self._on_cpu = not visible_gpus()
        max_model_len = options.input_len + max(options.max_tokens, first_tokens.BESIDE_LEN)
        engine = make_engine(options, folder, on_cpu=self._on_cpu, max_model_len=max_model_len)
        share = engine.options.get("gpu_memory_utilization", 0.9)
        if not options.apart:
            share /= len(options.targets)
        self.engine = replace(engine, options={**engine.options, "gpu_memory_utilization": share})
        self._started: dict[str, Running] = {}

    def runs(self) -> Iterator[tuple[Cell, int, str]]:
        """Each run's cell, round and target; targets that are kept change at each run."""
        options = self.options
        cells = [Cell(pattern, n) for n in options.n for pattern in options.patterns]
        rounds = [
            (number, target)
            for number in range(options.rounds)
            for target in (options.targets if number % 2 == 0 else reversed(options.targets))
        ]
        if options.apart:
            return ((cell, *one) for one in rounds for cell in cells)
        return ((cell, *one) for cell in cells for one in rounds)

    def get(self, name: str) -> Running:
        if name not in self._started:
            if self.options.apart:
                self._stack.close()
                self._started.clear()
            server = self._stack.enter_context(
                running(
                    self._target(name), self.engine, engine_environment(on_cpu=self._on_cpu),
                    self._folder / f"{name}.log",
                )
            )  # fmt: skip
            say(f"{name} is ready after {server.start_s:.0f} s")
            self._started[name] = server
            # A run that fills the slots warms up.
            few = argparse.Namespace(**{**vars(self.options), "completions": self.options.slots})
            measure(server, Cell(ONE, 1), self.engine.model, few, key="warm-up")
        return self._started[name]

    def _target(self, name: str) -> Any:
        if name == BARE:
            return BareGroups()
        if name == VLLM:
            return CountedVllmServe()
        if name == VLLM_4:
            return CountedVllmServe(num_api_servers=4)
        words = self.options.serve_options.split()
        if self.options.front_ends:
            words += ["--num-front-ends", str(self.options.front_ends)]
        return Titopool(1, options=words)


def measure(
    server: Running, cell: Cell, model: str, options: argparse.Namespace, *, key: str
) -> dict[str, Any]:
    """One run. Ends the benchmark if a request fails or a completion is missing."""
    chance = random.Random(f"{cell} {key}")
    prompts = [
        chance.choices(PROMPT_IDS, k=options.input_len)
        for _ in range(options.completions // cell.n)
    ]
    groups = [prompts] if cell.pattern == ONE else [[one] for one in prompts]
    calls = [Call(group, n=cell.n, sampling=options.sampling) for group in groups]
    target, at_once = server.target, min(options.clients, len(calls))
    if isinstance(target, BareGroups):
        limit = 0 if cell.pattern == ONE else at_once
        body = target.body_of_all(calls, limit, options.max_tokens)
        sent = send(f"{server.url}/run", [body], concurrency=1, headers=target.headers)
        check_statuses(target.name, sent.statuses, sent.answers)
        answer = json.loads(sent.answers[0])
        lengths, elapsed_s = answer["lengths"], answer["elapsed_s"]
        counted = {"running": None, "tokens_per_step": sum(lengths) / answer["num_steps"]}
    else:
        bodies = [target.body(call, options.max_tokens, model) for call in calls]
        url = f"{server.url}{target.path_of(calls[0])}"
        with watched(server.url) as seen:
            sent = send(url, bodies, concurrency=at_once, headers=target.headers)
            check_statuses(target.name, sent.statuses, sent.answers)
            lengths = [one for answer in sent.answers for one in target.lengths(answer)]
            counted = mean_counts(seen(sum(lengths)))
        elapsed_s = sent.elapsed_s
    check_lengths(target.name, lengths, options)
    return {
        "tokens_per_s": sum(lengths) / elapsed_s, "elapsed_s": elapsed_s,
        "mean_len": sum(lengths) / len(lengths), "max_len": max(lengths), **counted,
    }  # fmt: skip


def check_statuses(name: str, statuses: Sequence[int], answers: Sequence[bytes]) -> None:
    for status, answer in zip(statuses, answers, strict=True):
        if status != 200:
            sys.exit(f"{name}: a request failed with {status}: {answer[:1000]!r}")


def check_lengths(name: str, lengths: Sequence[int], options: argparse.Namespace) -> None:
    if len(lengths) != options.completions:
        sys.exit(f"{name}: expected {options.completions} completions, got {len(lengths)}")
    if not 1 <= min(lengths) <= max(lengths) <= options.max_tokens:
        sys.exit(
            f"{name}: expected 1 to {options.max_tokens} tokens, got {min(lengths)} to {max(lengths)}"
        )


if __name__ == "__main__":
    main()
