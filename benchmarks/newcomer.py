"""What a new worker takes from its start to its first answer, beside a worker under load.

    python -m benchmarks.newcomer [--shape qwen3-8b] [--sources folder peer] [--out FILE.jsonl]

One worker serves weights that an update from a folder has brought, and 64 requests are in flight. A
second worker starts on the same GPU (or CPU). With `folder` it finds the folder; with `peer` the folder
is gone, so it takes the weights from the first worker. Prints a line of JSON for each: seconds in each
phase and until the first answer, bytes, the first worker's tokens a second alone and while its
weights are read, and whether all parameters have equal digests afterwards.
"""

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.models import make_model
from harness.servers import REPOSITORY, Server, environment, running_server, wait_until

START_TIMEOUT_S = 400.0
LOAD = {"num_requests": 64, "input_len": 128, "output_len": 256}
# Of the measurement of the first worker alone.
ALONE_S = 8.0
SETTLE_S = 2
POLL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--sources", nargs="+", choices=("folder", "peer"), default=["folder"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve-options", default="", help="for both workers")
    options = parser.parse_args()
    for found in measure(options.shape, options.sources, options.serve_options.split()):
        line = json.dumps(found)
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")


def measure(shape: str, sources: Sequence[str], options: Sequence[str]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_model(shape, root / "model", with_weights=shape == "tiny")
        # In a process of its own, so that its GPU memory is free afterwards.
        words = [sys.executable, "-m", "benchmarks.models", shape, str(root / "new"), "weights"]
        subprocess.run(words, check=True, env=environment(), cwd=REPOSITORY)
        dummy = [] if shape == "tiny" else ["--load-format", "dummy"]
        words = [str(root / "model"), *dummy, *options, "--weights-root", name, "--run-dir", name]
        endpoints = root / "endpoints"
        endpoints.write_text(f"ipc://{root}/w0\n")
        served = [
            "--endpoints", f"file:{endpoints}", "--weights-root", name,
            "--curve-key-file", str(root / "key"),
        ]  # fmt: skip
        with (
            worker(root, 0, words),
            running_server(*served, log=root / "log", num_workers=1) as server,
        ):
            update = server.post("/update_weights", {"path": f"{root}/new", "policy": "keep"})
            assert update.status_code == 200, update.text
            with load(server):
                alone = tokens_per_s(server)
                for source in sources:
                    if source == "peer":
                        (root / "new").rename(root / "gone")
                    began = time.monotonic()
                    with worker(root, 1, words):
                        every = "".join(f"ipc://{root}/w{index}\n" for index in range(2))
                        endpoints.write_text(every)
                        yield {
                            "shape": shape, "source": source, **timeline(server, began),
                            "tokens_per_s_alone": alone, "equal": has_equal_digests(server),
                            "log": fetched(root / "log-1"),
                        }  # fmt: skip
                    # Until the pool sees that it has left.
                    wait_until(lambda: server.get("/ready").json()["num_ready"] == 1, 60)


@contextmanager
def worker(root: Path, index: int, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable, "-P", "-m", "workers", "--endpoint", f"ipc://{root}/w{index}",
        "--worker-id", str(index), *words,
    ]  # fmt: skip
    with Path(root, f"log-{index}").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(), cwd=REPOSITORY
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextmanager
def load(server: Server) -> Iterator[None]:
    numbers = [str(one) for one in LOAD.values()]
    words = [sys.executable, "-m", "benchmarks.weights.load", server.url, "", *numbers]
    model = server.get("/v1/models").json()["data"][0]["id"]
    words[4] = model
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment(), cwd=REPOSITORY)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        print("requests by status:", process.communicate()[0].decode().strip(), file=sys.stderr)


def tokens_per_s(server: Server) -> int:
    """Of the first worker, alone."""
    # Until all slots are taken, and a heartbeat says so.
    time.sleep(SETTLE_S)
    begin_s, before = time.monotonic(), num_tokens(server)
    time.sleep(ALONE_S)
    return round((num_tokens(server) - before) / (time.monotonic() - begin_s))


def timeline(server: Server, began: float) -> dict[str, Any]:
    """Follows the second worker to its first answer."""
    # (seconds since the start, phase, tokens of the first worker)
    seen: list[tuple[float, str, float]] = []
    wait_until(lambda: follow(server, seen, began), START_TIMEOUT_S, lambda: str(seen))
    wait_until(lambda: server.metrics("completed_jobs_total").get("1", 0), 120)
    answered_s = time.monotonic() - began
    spans = [
        (phase, following[0] - at_s, following[2] - tokens)
        for (at_s, phase, tokens), following in itertools.pairwise(seen)
    ]
    return {
        "phases_s": [(phase, round(span_s, 2)) for phase, span_s, _ in spans],
        "ready_s": round(seen[-1][0], 2), "first_answer_s": round(answered_s, 2),
        "tokens_per_s_beside": [
            (phase, round(num / span_s)) for phase, span_s, num in spans if span_s > 2
        ],
    }  # fmt: skip


def follow(server: Server, seen: list[tuple[float, str, float]], began: float) -> bool:
    """Notes the second worker's phase if it is a new one; whether it is ready."""
    workers = server.get("/ready").json()["workers"]
    phase = next((one["phase"] for one in workers if one["endpoint"].endswith("w1")), "unknown")
    if not seen or seen[-1][1] != phase:
        seen.append((time.monotonic() - began, phase, num_tokens(server)))
    time.sleep(POLL_S)
    return bool(phase == "ready")


def num_tokens(server: Server) -> float:
    return sum(server.metrics("completion_tokens_total").values())


def has_equal_digests(server: Server) -> bool | str:
    """Whether all parameters are alike; the error if they cannot be compared."""
    answer = server.post("/weight_checker/", {"action": "checksum"})
    if answer.status_code != 200:
        return answer.text
    found: dict[str, str] = answer.json()["checksums"]
    first, second = (
        {name.partition(":")[2]: digest for name, digest in found.items() if name.startswith(one)}
        for one in ("dp0:", "dp1:")
    )
    return bool(first) and first == second


def fetched(log: Path) -> list[str]:
    return re.findall(r"fetched the weights from another worker: .*", log.read_text())


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
