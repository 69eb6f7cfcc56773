"""What it costs to watch a server: tokens a second with all of it on and off, in alternating pairs.

    python -m benchmarks.watching [--shape qwen3-0.6b] [--pairs 10] [--requests 512] [--max-s SECONDS]
        [--out FILE.jsonl] [--serve-options "…"]

Two servers of one model share the GPU; one of them at a time has load. "Off" has no metrics, keeps no
log-probabilities and writes text. "On" has the defaults, JSON logs and traces of one request in a
hundred; a collector takes them, and everything that the page, Prometheus and `titopool status` ask for
is asked every second. Each run is requests of one prompt of 256 ids and 128 sampled tokens, all at
once. After two pairs, none begins later than `--max-s`. Prints a line of JSON: the
ratios on / off, their mean with its 95 % interval (Student's t, of logarithms), and the seconds of a
scrape of /metrics under load.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.intervals import paired
from benchmarks.load import send
from benchmarks.models import PROMPT_IDS, SHAPES
from harness.servers import REPOSITORY, Server, environment, running_server

# Before this process has threads.
FORK = multiprocessing.get_context("fork")
PROMPT_LEN, MAX_TOKENS = 256, 128
OFF = ("--metrics", "false", "--kept-logprobs-bytes", "0")
TRACE_RATIO = 0.01
POLLED = ("/metrics", "/metrics/history", "/workers", "/requests")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--pairs", type=int, default=10, choices=range(2, 101), metavar="2..100")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--max-s", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve-options", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = f"{name}/model"
        is_tiny = options.shape == "tiny"
        words = [sys.executable, "-m", "benchmarks.models", options.shape, model]
        words.append("weights" if is_tiny else "dummy")
        subprocess.run(words, check=True, env=environment(), cwd=REPOSITORY)
        served = [model, *([] if is_tiny else ["--load-format", "dummy"])]
        served += options.serve_options.split()
        traces = stack.enter_context(collector())
        on = (
            "--log-format",
            "json",
            "--otlp-endpoint",
            traces,
            "--trace-ratio",
            str(TRACE_RATIO),
        )
        servers = {
            kind: stack.enter_context(
                running_server(*served, *chosen, log=Path(name, f"{kind}.log"))
            )
            for kind, chosen in (("off", OFF), ("on", on))
        }
        end = stack.enter_context(watched(servers["on"]))
        found = measure(servers, options.pairs, options.requests, options.max_s)
        scrapes = end()
        found["scrape_s"] = {"median": statistics.median(scrapes), "greatest": max(scrapes)}
    line = json.dumps({"shape": options.shape, "requests": options.requests, **found})
    print(line, flush=True)
    if options.out:
        with options.out.open("a") as file:
            file.write(line + "\n")


@contextmanager
def collector() -> Iterator[str]:
    """Takes traces and drops them; its URL."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_collect, args=(sender,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.kill()


def _collect(ports: Connection) -> None:
    listener = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    ports.send(listener.server_address[1])
    listener.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def watched(server: Server) -> Iterator[Callable[[], list[float]]]:
    """Asks for all that is polled, each second. What it yields ends that, and returns the seconds of
    each answer of /metrics."""
    own, other = FORK.Pipe()
    process = FORK.Process(target=_watch, args=(server, other), daemon=True)
    process.start()

    def end() -> list[float]:
        own.send(None)
        seconds: list[float] = own.recv()
        return seconds

    try:
        yield end
    finally:
        process.kill()


def _watch(server: Server, pipe: Connection) -> None:
    seconds = []
    while not pipe.poll(1):
        for path in POLLED:
            began = time.monotonic()
            assert server.get(path).status_code == 200, path
            if path == "/metrics":
                seconds.append(time.monotonic() - began)
    pipe.send(seconds)


def measure(
    servers: dict[str, Server], num_pairs: int, num_requests: int, max_s: float
) -> dict[str, object]:
    """Alternates which of the two is first. Makes two pairs at least, whatever `max_s`."""
    deadline = time.monotonic() + max_s
    numbers = random.Random(0)
    for server in servers.values():
        tokens_per_s(server, numbers, num_requests)
    rates: dict[str, list[float]] = {kind: [] for kind in servers}
    for index in range(num_pairs):
        if index >= 2 and time.monotonic() > deadline:
            break
        for kind in sorted(servers, reverse=index % 2 == 1):
            rates[kind].append(tokens_per_s(servers[kind], numbers, num_requests))
        print(index, {kind: round(found[-1]) for kind, found in rates.items()}, file=sys.stderr)
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    found = paired(ratios)
    return {
        "tokens_per_s": {kind: [round(one) for one in found] for kind, found in rates.items()},
        "ratios": [round(one, 4) for one in ratios],
        "ratio": round(found.mean, 4),
        "interval": [round(found.low, 4), round(found.high, 4)],
    }


def tokens_per_s(server: Server, numbers: random.Random, num_requests: int) -> float:
    fields = {"max_tokens": MAX_TOKENS, "logprobs": 0, "generation_kwargs": {"ignore_eos": True}}
    bodies = [
        json.dumps({"prompts": [numbers.choices(PROMPT_IDS, k=PROMPT_LEN)], **fields}).encode()
        for _ in range(num_requests)
    ]
    sent = send(
        f"{server.url}/generate/", bodies, concurrency=num_requests,
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert set(sent.statuses) == {200}, sent.answers[0][:500]
    return num_requests * MAX_TOKENS / sent.elapsed_s


if __name__ == "__main__":
    main()
