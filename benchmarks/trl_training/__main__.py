"""TRL's GRPOTrainer learns through this server and through its own: rewards and seconds a step.

    python -m benchmarks.trl_training --trl FOLDER… [--out NAME]     # two GPUs

Each FOLDER has one version of the package trl and is named by it. The tasks are examples/trl_grpo.py
and examples/trl_grpo_images.py; both begin with the same random model at each server. All servers run
throughout, and only one is in use at a time, with the trainer on the other GPU. TRL before 1.11
trains beside `trl vllm-serve`, later ones beside `vllm serve`.

The package datasets must lie below a folder named site-packages: modules of other folders are pickled
by value, which fails for it. A server that a version cannot use is a row with the error. Writes NAME.json (every step) and NAME.png.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.processes import engine_environment, running
from benchmarks.targets import Engine, Target, Titopool, TrlServe, VllmServe

TASKS = {"trl_grpo": 64, "trl_grpo_images": 256}  # with the context's tokens
# The first of TRL that speaks vLLM's own wire.
FIRST_WITH_VLLM_WIRE = (1, 11)
TRAINING_TIMEOUT_S = 240
# Servers that start beside each other cannot measure what is free.
KV_CACHE_BYTES = 2 * 1024**3
# Of each server; TRL's own measures what is free.
GPUS = {"titopool": 0, "vllm serve": 0, "trl vllm-serve": 1}

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl", nargs="+", required=True, help="folders with trl")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="trl-training", help="path of the results, no extension")
    options = parser.parse_args()
    out = Path(options.out)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for task in options.tasks:
            model = str(Path(name) / task)
            make_model(task, model)
            with running_servers(task, model, options.trl, out) as urls:
                for trl in map(Path, options.trl):
                    for server in ("titopool", peer_of(trl)):
                        gpu = 1 - GPUS[server]
                        found = train(task, model, urls[server], trl, gpu, options.steps)
                        row = {"task": task, "trl": trl.name, "server": server, **found}
                        rows.append(row)
                        print(summary(row), flush=True)
                        results = {"machine": describe_machine(), "rows": rows}
                        out.with_suffix(".json").write_text(json.dumps(results))
    draw(rows, str(out.with_suffix(".png")))


def make_model(task: str, folder: str) -> None:
    words = [sys.executable, f"examples/{task}.py", "--make-model", folder]
    subprocess.run(words, check=True, capture_output=True)


def peer_of(trl: Path) -> str:
    """The server that this version was written for."""
    version = tuple(map(int, trl.name.split(".")[:2]))
    return "vllm serve" if version >= FIRST_WITH_VLLM_WIRE else "trl vllm-serve"


@contextmanager
def running_servers(task: str, model: str, trl: list[str], out: Path) -> Iterator[dict[str, str]]:
    """URLs of the servers by name; an error's text in place of the URL of one that did not start."""
    options = {"max_model_len": TASKS[task], "kv_cache_memory_bytes": KV_CACHE_BYTES}
    transfer = {"weight_transfer_config": '{"backend": "nccl"}'}
    targets: dict[str, tuple[Target, dict[str, Any]]] = {"titopool": (Titopool(1), options)}
    for folder in map(Path, trl):
        if peer_of(folder) == "vllm serve":
            targets["vllm serve"] = (VllmServe(), options | transfer)
        else:
            own = {"max_model_len": TASKS[task], "gpu_memory_utilization": 0.3}
            targets["trl vllm-serve"] = (TrlServe(str(folder)), own)
    environ = engine_environment(on_cpu=False) | {"VLLM_SERVER_DEV_MODE": "1"}
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def start(name: str) -> str:
            target, options = targets[name]
            gpu = {"CUDA_VISIBLE_DEVICES": str(GPUS[name])}
            log = out.with_name(f"{task}-{name.replace(' ', '-')}.log")
            try:
                server = running(target, Engine(model, options), environ | gpu, log)
                return stack.enter_context(server).url
            except SystemExit as error:
                return str(error)

        yield dict(zip(targets, threads.map(start, targets), strict=True))


def train(task: str, model: str, url: str, trl: Path, gpu: int, num_steps: int) -> Row:
    """The steps of one training, or its error."""
    if not url.startswith("http"):
        return {"error": url}
    path = os.pathsep.join(filter(None, (str(trl), os.getcwd(), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": str(gpu)}
    # Accelerate's default for one process, "cuda", is another device than "cuda:0" for vLLM's
    # communicator in TRL 1.9.2.
    environ["ACCELERATE_TORCH_DEVICE"] = "cuda:0"
    words = [sys.executable, "-m", "benchmarks.trl_training.timed"]
    words += [task, model, url, str(num_steps)]
    try:
        done = subprocess.run(
            words, env=environ, capture_output=True, text=True, timeout=TRAINING_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        return {"error": f"no end within {TRAINING_TIMEOUT_S} s: {str(error.stderr)[-2000:]}"}
    if done.returncode:
        return {"error": f"{done.stderr[:2000]}…\n{done.stderr[-3000:]}"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"reward"')]
    return {"steps": [json.loads(line) for line in lines]}


def summary(row: Row) -> str:
    title = f"{row['task']}, TRL {row['trl']}, {row['server']}"
    if "error" in row:
        return f"{title}: {row['error'].strip().splitlines()[-1]}"
    rewards = [step["reward"] for step in row["steps"]]
    seconds = {
        # The first step has the rendezvous and the kernels' compilation.
        name: median(seconds_of(step, name) for step in row["steps"][1:])
        for name in ("step_s", "generate_s", "train_s", "update_s")
    }
    parts = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    last = sum(rewards[-5:]) / 5
    return f"{title}: reward {rewards[0]:.3f} to {last:.3f} in {len(rewards)} steps; {parts}"


def seconds_of(step: dict[str, float], name: str) -> float:
    """A part of a step; `train_s` is what generation and the update leave."""
    if name == "train_s":
        return step["step_s"] - step["generate_s"] - step["update_s"]
    return step[name]


def draw(rows: list[Row], path: str) -> None:
    """The rewards over the steps, a picture a task."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    tasks = sorted({row["task"] for row in rows})
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(5 * len(tasks), 3.5), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for row in rows:
            if row["task"] == task and "steps" in row:
                rewards = [step["reward"] for step in row["steps"]]
                axis.plot(rewards, label=f"TRL {row['trl']}, {row['server']}")
        axis.set(title=task, xlabel="step", ylabel="reward", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
