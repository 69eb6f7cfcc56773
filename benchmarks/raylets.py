"""An engine that spans two nodes of a Ray cluster, and one engine on each, on one host with 2 or 4 GPUs.

    python -m benchmarks.raylets [--shape qwen3-0.6b] [--num-gpus 2] [--modes …] [--out FILE.jsonl]
        [--serve-options "…"]

Two raylets on addresses of the loopback interface stand for two nodes; each has half of the GPUs.
Random weights, greedy, four prompts at a time for each engine. The modes:

    plain-half     `titopool serve`, two engines, each on half of the GPUs
    plain-all      `titopool serve`, one engine on all GPUs
    ray-half       `titopool serve --cluster ray`, an engine on each raylet
    ray-spanning   `titopool serve --cluster ray`, one engine over both raylets, by vLLM's Ray executor

Prints a line of JSON for each: seconds until the server is ready, seconds of all prompts, jobs of
each worker, and how many completions equal those of each mode before it. The code is 1 if a mode of
Ray differs from the plain one of its size, if an engine had no job, or if the ranks of `ray-spanning`
were not on both raylets. The size of an engine alone may change a greedy id: sums are rounded
differently.

Without GPUs an engine has a core, and vLLM's CPU build refuses its Ray executor, so that the modes are
plain-half and ray-half.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.models import PROMPT_IDS
from harness.servers import (
    REPOSITORY,
    Server,
    environment,
    free_port,
    kill_all,
    running_server,
    wait_until,
)
from titopool.settings.gpus import visible_gpus

MODES = ("plain-half", "plain-all", "ray-half", "ray-spanning")
# The plain mode with engines of the same size.
PLAIN = {"ray-half": "plain-half", "ray-spanning": "plain-all"}
# vLLM's first Ray executor wants an address of its own for each node.
ADDRESSES = ("127.0.0.2", "127.0.0.3")
STORE_BYTES = 256 * 2**20
NUM_PROMPTS, PROMPT_LEN, MAX_TOKENS = 16, 64, 64
# Of a raylet, on a busy machine.
START_TIMEOUT_S, STOP_TIMEOUT_S = 90.0, 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--num-gpus", type=int, default=len(visible_gpus()) // 2 * 2)
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve-options", default="")
    options = parser.parse_args()
    gpus = visible_gpus()[: options.num_gpus]
    if len(gpus) % 2 or len(gpus) != options.num_gpus:
        parser.error(
            f"--num-gpus: expected an even number of the {len(visible_gpus())} visible GPUs, got "
            f"{options.num_gpus}; lower it, or change CUDA_VISIBLE_DEVICES"
        )
    modes = options.modes or (MODES if gpus else ("plain-half", "ray-half"))
    if not gpus and set(modes) & {"plain-all", "ray-spanning"}:
        parser.error(
            "--modes: expected plain-half and ray-half on a host without GPUs, got modes of several "
            "GPUs; vLLM's CPU build has no Ray executor"
        )
    is_good = True
    with tempfile.TemporaryDirectory(prefix="raylets-") as name:
        model = f"{name}/model"
        # In a process of its own, so that its GPU memory is free afterwards.
        words = [sys.executable, "-m", "benchmarks.models", options.shape, model, "weights"]
        subprocess.run(words, check=True, env=environment(), cwd=REPOSITORY)
        found: dict[str, list[list[int]]] = {}
        for mode in modes:
            # A rounded sum decides between two ids less often than in bfloat16.
            words = [model, "--dtype", "float32", *options.serve_options.split()]
            line, ids = run(mode, Path(name), words, gpus)
            same = {other: num_equal(ids, others) for other, others in found.items()}
            found[mode] = ids
            line |= {"shape": options.shape, "num_prompts": NUM_PROMPTS, "num_equal": same}
            is_good &= same.get(PLAIN.get(mode, ""), NUM_PROMPTS) == NUM_PROMPTS
            is_good &= len(line["jobs"]) == line["num_engines"] and all(line["jobs"].values())
            is_good &= mode != "ray-spanning" or all(line["nodes"])
            text = json.dumps(line)
            print(text, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(text + "\n")
    return 0 if is_good else 1


def run(
    mode: str, folder: Path, words: Sequence[str], gpus: Sequence[str]
) -> tuple[dict[str, Any], list[list[int]]]:
    """Serves in one mode; its line, and the ids of each completion."""
    kind, _, extent = mode.partition("-")
    size = max(1, len(gpus) if extent in ("all", "spanning") else len(gpus) // 2)
    num_engines = 2 if extent == "half" else 1
    served = [*words, "--tensor-parallel-size", str(size), "--num-workers", str(num_engines)]
    if num_engines == 1:
        # vLLM's own all-reduce looks for the GPUs of another node of this host among its own.
        served.append("--disable-custom-all-reduce")
    log = folder / f"{mode}.log"
    if kind == "plain":
        began = time.monotonic()
        with running_server(
            *served, log=log, num_workers=num_engines, CUDA_VISIBLE_DEVICES=",".join(gpus)
        ) as server:
            line, ids = measure(server, began)
    else:
        with raylets(folder, gpus) as nodes:
            began = time.monotonic()
            with running_server(
                *served, "--cluster", "ray", log=log, num_workers=num_engines,
                RAY_ADDRESS=nodes[0].address,
            ) as server:  # fmt: skip
                line, ids = measure(server, began)
                line["nodes"] = [node.num_ranks() for node in nodes]
    return {"mode": mode, "num_engines": num_engines, "ranks_of_engine": size, **line}, ids


def measure(server: Server, began: float) -> tuple[dict[str, Any], list[list[int]]]:
    ready_s = time.monotonic() - began
    chance = np.random.default_rng(0)
    prompts = chance.choice(np.array(PROMPT_IDS), (NUM_PROMPTS, PROMPT_LEN)).tolist()
    began = time.monotonic()

    def generate(prompt: list[int]) -> list[int]:
        answer = server.generate([prompt], max_tokens=MAX_TOKENS, temperature=0)
        ids: list[int] = answer["completion_ids"][0]
        return ids

    # Enough that every engine has some, and few: the size of a batch changes how sums are rounded.
    with ThreadPoolExecutor(4 * server.num_workers) as pool:
        ids = list(pool.map(generate, prompts))
    jobs = lambda: server.metrics("completed_jobs_total")  # noqa: E731
    generate_s = time.monotonic() - began
    # Until the workers' next heartbeats.
    wait_until(lambda: sum(jobs().values()) >= NUM_PROMPTS, 10, lambda: str(jobs()))
    line = {
        "ready_s": round(ready_s, 1), "generate_s": round(generate_s, 2), "jobs": jobs(),
    }  # fmt: skip
    return line, ids


def num_equal(ids: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    return sum(one == other for one, other in zip(ids, others, strict=True))


class Raylet:
    """A node of the cluster; the first one is its head."""

    def __init__(self, folder: Path, index: int, gpus: Sequence[str], head: "Raylet | None"):
        """Starts it and waits until the cluster knows it."""
        self.address = head.address if head else f"{ADDRESSES[0]}:{free_port()}"
        self._log = folder / f"raylet-{index}.log"
        self._host = ADDRESSES[index]
        port = self.address.rpartition(":")[2]
        role = (
            ["--address", self.address] if head else
            ["--head", "--port", port, "--include-dashboard", "false", "--temp-dir", f"{folder}/ray"]
        )  # fmt: skip
        # Ray numbers the GPUs in CUDA_VISIBLE_DEVICES; vLLM takes its address from VLLM_HOST_IP.
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "VLLM_HOST_IP": self._host}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role,
                    "--node-ip-address", self._host, "--num-gpus", str(len(gpus)),
                    "--num-cpus", str(len(os.sched_getaffinity(0))),
                    "--object-store-memory", str(STORE_BYTES), "--disable-usage-stats",
                ],
                env=environment(**own), cwd=REPOSITORY, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            wait_until(self._has_started, START_TIMEOUT_S, self._explain)
        except BaseException:
            self.stop()
            raise

    def _has_started(self) -> bool:
        assert self._process.poll() is None, f"the raylet has ended: {self._explain()}"
        return "Ray runtime started" in self._log.read_text(errors="replace")

    def _explain(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def num_ranks(self) -> int:
        """Processes of vLLM's Ray executor on this node."""
        below = psutil.Process(self._process.pid).children(recursive=True)
        titles = []
        for one in below:
            with suppress(psutil.NoSuchProcess):
                titles += one.cmdline()[:1]
        return sum(title.startswith("ray::RayWorker") for title in titles)

    def stop(self) -> None:
        """Ends it with all of its processes."""
        below: list[psutil.Process] = []
        # It may have ended by itself.
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        kill_all(below)


@contextmanager
def raylets(folder: Path, gpus: Sequence[str]) -> Iterator[list[Raylet]]:
    """Two nodes on this host, each with half of the GPUs."""
    half = len(gpus) // 2
    nodes: list[Raylet] = []
    try:
        nodes.append(Raylet(folder, 0, gpus[:half], None))
        nodes.append(Raylet(folder, 1, gpus[half:], nodes[0]))
        yield nodes
    finally:
        # The head last: the other one asks it.
        for node in reversed(nodes):
            node.stop()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Raylets outlive a process that ends without its `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
