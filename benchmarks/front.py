"""Front ends and messages alone: real gunicorn and sockets, stub engines in the workers.

    python -m benchmarks.front [--num-front-ends 1 2 4] [--num-clients 1 16 256 2048]

A stub engine returns the requested number of tokens immediately. So the benchmark measures what a
request and a token cost outside the engine, which is the limit that front ends set.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bench import check_lengths, quantiles, say
from benchmarks.load import send
from benchmarks.machine import describe_machine
from benchmarks.processes import Running, running
from benchmarks.targets import Engine, Titopool
from benchmarks.workload import Call, Pattern, Sizes, make_pattern

COLUMNS = (
    "front ends", "clients", "prompts a request", "answer", "requests/s", "tokens/s",
    "CPU µs / request", "CPU µs / token", "p50 ms", "p99 ms", "bytes / token", "failures",
)  # fmt: skip


class FrontEnd(Titopool):
    """This server, with workers that run already."""

    def __init__(self, num_front_ends: int, endpoints: list[str], *, kind: str):
        super().__init__(len(endpoints), binary=kind == "MessagePack")
        self.num_front_ends = num_front_ends
        self.kind = kind
        self._endpoints = endpoints

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        words = [sys.executable, "-m", "titopool.cli", "serve", "--port", str(port)]
        words += ["--num-front-ends", str(self.num_front_ends)]
        return [*words, "--endpoints", ",".join(self._endpoints)], {}

    def body(self, call: Call, output_len: int, model: str) -> bytes:
        fields = json.loads(super().body(call, output_len, model))
        if self.kind == "no logprobs":
            fields["logprobs"] = None
        return json.dumps(fields, separators=(",", ":")).encode()

    def lengths(self, answer: bytes) -> list[int]:
        if self.kind == "no logprobs":
            return [len(ids) for ids in json.loads(answer)["completion_ids"]]
        return super().lengths(answer)


KINDS = ("JSON", "no logprobs", "MessagePack")


def main() -> None:
    options = parse_arguments()
    runs = []
    environ = stub_environment()
    for num_front_ends in options.num_front_ends:
        with (
            tempfile.TemporaryDirectory() as folder,
            stub_workers(options.num_workers, Path(folder)) as found,
        ):
            target = FrontEnd(num_front_ends, found, kind="JSON")
            with running(target, Engine("", {}), environ, Path(folder) / "log") as server:
                for kind in options.answers:
                    asked = FrontEnd(num_front_ends, found, kind=kind)
                    runs += [measure(server, asked, pattern) for pattern in patterns(options)]
    result = {"machine": describe_machine(), "options": vars(options), "runs": runs}
    table = markdown(result)
    print(table)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-front-ends", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--num-clients", type=int, nargs="+", default=[1, 16, 256, 2048])
    parser.add_argument("--num-workers", type=int, default=1, help="stub workers")
    parser.add_argument(
        "--num-tokens", type=int, default=256, help="tokens of each prompt, and of each completion"
    )
    parser.add_argument("--answers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--out", default="bench-front", help="path of the result files, without extension"
    )
    return parser.parse_args()


@contextmanager
def stub_workers(num_workers: int, folder: Path, *options: str) -> Iterator[list[str]]:
    """Starts stub workers, yields their endpoints and stops them."""
    endpoints = [f"ipc://{folder}/worker-{index}" for index in range(num_workers)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "harness.stub_worker", "--endpoint", endpoint, "--worker-id",
             f"stub-{index}", "--max-num-seqs", "4096", *options], env=stub_environment()
        )
        for index, endpoint in enumerate(endpoints)
    ]  # fmt: skip
    try:
        yield endpoints
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def stub_environment() -> dict[str, str]:
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "TITOPOOL_LOG_LEVEL": "warning"}


def patterns(options: argparse.Namespace) -> Iterator[Pattern]:
    """One-prompt requests from each number of clients, then requests with many prompts."""
    length = options.num_tokens
    for num_clients in options.num_clients:
        num_calls = min(4096, max(500, 3 * num_clients))
        calls = make_pattern("single", Sizes(num_calls, length, length), repeat=0).calls
        yield Pattern(str(num_clients), calls, num_clients, length)
    batch = make_pattern("batch", Sizes(512, length, length), repeat=0)
    yield Pattern("1", batch.calls * 5, 1, length)


def measure(server: Running, target: FrontEnd, pattern: Pattern) -> dict[str, Any]:
    bodies = [target.body(call, pattern.output_len, "") for call in pattern.calls]

    def send_all(some: list[bytes]) -> Any:
        return send(
            f"{server.url}{target.path_of(pattern.calls[0])}", some, concurrency=min(pattern.concurrency, len(some)),
            headers=target.headers,
        )  # fmt: skip

    send_all(bodies[: len(bodies) // 5])
    before = server.cpu_s()["front_end"]
    sent = send_all(bodies)
    cpu_s = server.cpu_s()["front_end"] - before
    good = [one for status, one in zip(sent.statuses, sent.answers, strict=True) if status == 200]
    check_lengths(target, pattern, good, num_expected=len(good))
    say(f"{target.num_front_ends} front ends, {pattern.name} clients, {target.kind}: "
        f"{len(good) / sent.elapsed_s:,.0f} requests/s, {1e6 * cpu_s / len(bodies):,.0f} µs each")  # fmt: skip
    return {
        "num_front_ends": target.num_front_ends, "num_clients": pattern.concurrency,
        "num_prompts": len(pattern.calls[0].prompts), "answer": target.kind,
        "num_calls": len(bodies), "num_failures": len(bodies) - len(good),
        "num_tokens": pattern.num_tokens, "elapsed_s": sent.elapsed_s, "front_end_cpu_s": cpu_s,
        "latencies_s": quantiles(sent.latencies_s), "num_bytes": sum(map(len, good)),
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The results as a table."""
    machine = result["machine"]
    lines = [
        f"{machine['date']}, {machine['num_cores']} cores of {machine['processor']}, shared with "
        f"clients and {result['options']['num_workers']} stub worker(s); "
        f"{result['options']['num_tokens']} ids in and out",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for run in result["runs"]:
        elapsed_s, cpu_s = run["elapsed_s"], run["front_end_cpu_s"]
        cells = (
            run["num_front_ends"], run["num_clients"], run["num_prompts"], run["answer"],
            f"{run['num_calls'] / elapsed_s:,.0f}", f"{run['num_tokens'] / elapsed_s:,.0f}",
            f"{1e6 * cpu_s / run['num_calls']:,.0f}", f"{1e6 * cpu_s / run['num_tokens']:.2f}",
            f"{1e3 * run['latencies_s']['p50']:.1f}", f"{1e3 * run['latencies_s']['p99']:.1f}",
            f"{run['num_bytes'] / run['num_tokens']:.1f}", run["num_failures"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
