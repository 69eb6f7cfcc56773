"""Seconds until a server and a killed worker are ready.

    python -m benchmarks.restarts [--num-workers 1 2] [--serve-options '--worker-command "python -m workers"']

The option makes each worker a new interpreter; by default workers are forks of a process that has imported
vLLM. CPU seconds are those of all processes until ready, memory is proportional (PSS).
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.models import SHAPES
from harness.servers import Server, serve_process, wait_until, worker_pids
from titopool.settings.gpus import visible_gpus

READY_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--serve-options", default="")
    options = parser.parse_args()
    print("| workers | server ready | worker ready again | CPU | memory |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        words = [sys.executable, "-m", "benchmarks.models", options.shape, model, "weights"]
        subprocess.run(words, check=True, timeout=600)
        for number in options.num_workers:
            print(row(model, number, shlex.split(options.serve_options)), flush=True)


def row(model: str, num_workers: int, options: list[str]) -> str:
    began_s = time.monotonic()
    log = Path(model).with_name("log")
    words = ("--num-workers", str(num_workers), *options)
    if not visible_gpus():
        words = ("--kv-cache-memory-bytes", str(2**28), *words)
    process, url = serve_process(model, *words, log=log)
    server = Server(process, url, log, num_workers)
    try:
        server.wait_until_ready(num_workers)
        ready_s = time.monotonic() - began_s
        family = psutil.Process(process.pid).children(recursive=True)
        cpu_s = sum(sum(one.cpu_times()[:2]) for one in family)
        memory = sum(one.memory_full_info().pss for one in family)
        began_s = time.monotonic()
        os.kill(worker_pids(server)[0], signal.SIGKILL)
        for wanted in (num_workers - 1, num_workers):
            wait_until(lambda wanted=wanted: is_ready(server, wanted), READY_S)
        again_s = time.monotonic() - began_s
        # Why it did not fork, if it did not.
        for line in server.log.splitlines():
            if "new interpreter" in line:
                print(line, file=sys.stderr)
    finally:
        process.terminate()
        process.wait(60)
    return (
        f"| {num_workers} | {ready_s:.1f} s | {again_s:.1f} s | {cpu_s:.1f} s | "
        f"{memory / 2**20:,.0f} MiB |"
    )


def is_ready(server: Server, num_workers: int) -> bool:
    return bool(server.get("/ready").json()["num_ready"] == num_workers)


if __name__ == "__main__":
    main()
