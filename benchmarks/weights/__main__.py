"""Measures weight updates and appends rows to a table.

    python -m benchmarks.weights --shape qwen3-8b                    # two GPUs: worker, trainer
    python -m benchmarks.weights --shape qwen3-8b --num-workers 2    # three
    python -m benchmarks.weights --shape qwen3-8b --trl FOLDER…      # and TRL's clients
    python -m benchmarks.weights --shape tiny --repeats 2            # no GPU: gloo, titopool only

This process is the trainer, on the GPU after the workers'. Servers start with dummy weights, vLLM's
default options and `--serve-options`; the trainer sends two sets of random weights in turn. After each
update the server's log-probabilities are compared with transformers', for prompts that were asked
before the update too. All rows of a call are of the same GPUs, one server after the other.

Loads: `idle`; `keep`, `drain`, `abort`: NUM_REQUESTS requests in flight, updates with that pause mode.
With `keep`, prompts are so long that they fill 82 % of the KV cache; the check after each update waits
until all of them are in it again.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.models import SHAPES, make_model
from benchmarks.weights.adapter import RANK, Adapter
from benchmarks.weights.bare import bare_seconds
from benchmarks.weights.memory import GpuMemory
from benchmarks.weights.table import Row, add, row_of
from benchmarks.weights.trainer import PROMPT, Answers, Trainer, greedy, num_bytes_of
from benchmarks.weights.updaters import (
    Titopool,
    TrlTrainer,
    Updater,
    Vllm,
    kv_tokens,
    titopool_server,
    vllm_server,
)
from harness.servers import Server
from titopool.settings.gpus import visible_gpus

# Share of the KV cache that the requests of the load `keep` fill with their prompts.
KV_IN_USE = 0.82
# Not asked before, so that no cache has parts of it.
UNSEEN_PROMPT = list(range(200, 232))
# Of the other loads.
SHORT_LEN = 64
NUM_REQUESTS = 256
LOADS = ("idle", "keep", "drain", "abort")
SERVERS = ("titopool", "vllm")


def main() -> None:
    options = parse_arguments()
    gpus = visible_gpus()
    num_served = options.num_workers * options.tp
    place = num_served if options.trainer_gpu is None else options.trainer_gpu
    assert not gpus or len(gpus) > place, f"expected {place + 1} GPUs, got {len(gpus)}"
    device = torch.device("cuda", place) if gpus else torch.device("cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(options.shape, Path(name) / "model", with_weights=False)
        config = json.loads((Path(folder) / "config.json").read_text())
        options.max_model_len = min(options.max_model_len, config["max_position_embeddings"])
        facts = facts_of(options)
        if place == num_served:
            num_bytes = num_bytes_of(folder, options.dtype)
            write(bare_rows(num_bytes, num_served + 1, options, facts), options)
        trainer = Trainer(folder, device, options.dtype, options.tolerance)
        if options.lora:
            trainer.adapter = Adapter(trainer.models[0], Path(name) / "adapter")
            options.serve_options += f" --enable-lora --max-lora-rank {RANK}"
        for which in options.servers:
            with server_of(which, folder, gpus[:num_served], options) as server:
                if place < num_served:
                    # NCCL refuses two ranks of one host on one GPU. The server has its own name.
                    os.environ["NCCL_HOSTID"] = "trainer"
                for row in rows_of(which, server, folder, trainer, gpus[:1], options):
                    write([facts | row], options)
                updated = greedy(server, [UNSEEN_PROMPT])
            os.environ.pop("NCCL_HOSTID", None)
            if options.fresh_start:
                trainer.last_sent.save_pretrained(folder)
                with server_of(which, folder, gpus[:num_served], options, "auto") as server:
                    compare(updated, greedy(server, [UNSEEN_PROMPT]))


def compare(updated: Answers, fresh: Answers) -> None:
    """Prints whether a server samples after its updates what one samples that began with them."""
    (updated_ids, updated_logprobs), (fresh_ids, fresh_logprobs) = updated[0], fresh[0]
    differences = [abs(a - b) for a, b in zip(updated_logprobs, fresh_logprobs, strict=True)]
    print(f"fresh start: {max(differences)} apart", flush=True)
    assert updated_ids == fresh_ids, (updated_ids, fresh_ids)


def write(rows: list[Row], options: argparse.Namespace) -> None:
    for row in rows:
        print({key: value for key, value in row.items() if key != "runs"}, flush=True)
    add(rows, Path(options.out))


def facts_of(options: argparse.Namespace) -> Row:
    """What all rows of this call have in common."""
    machine = describe_machine()
    gpus = machine["gpus"]
    model = options.shape
    if options.num_workers > 1:
        model += f", {options.num_workers} workers"
    if options.tp > 1:
        model += f", TP {options.tp}"
    if options.lora:
        model += ", an adapter loaded"
    if options.trainer_gpu is not None:
        model += ", trainer on a worker's GPU"
    if options.serve_options:
        model += f", `{options.serve_options.strip()}`"
    host = f"{len(gpus)} × {gpus[0]}" if gpus else f"{machine['num_cores']} cores"
    # Tells calls apart.
    began = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return {"model": model, "call": began, "host": host, "machine": machine}


def bare_rows(num_bytes: int, size: int, options: argparse.Namespace, facts: Row) -> list[Row]:
    """The bare broadcast of as many bytes, before models and engines take the memory."""
    seconds = bare_seconds(
        num_bytes, size=size, on_gpu=torch.cuda.is_available(), repeats=options.repeats
    )
    runs = [{"total_s": one} for one in seconds]
    gigabytes = num_bytes / 1e9
    return [facts | row_of(runs, server="bare broadcast", load=f"{gigabytes:.1f} GB")]


@contextmanager
def server_of(
    which: str,
    folder: str,
    gpus: list[str],
    options: argparse.Namespace,
    load_format: str = "dummy",
) -> Iterator[Server]:
    """A running server, `titopool` or `vllm`."""
    log = Path(options.out).with_name(f"{options.shape}-{which}.log")
    if which == "titopool":
        words = [
            "--num-workers", str(options.num_workers), "--tensor-parallel-size", str(options.tp),
            "--max-model-len", str(options.max_model_len), "--dtype", options.dtype,
            "--load-format", load_format, "--weights-root", str(Path(folder).parent),
            *options.serve_options.split(),
        ]  # fmt: skip
        with titopool_server(folder, words, log, ",".join(gpus)) as server:
            yield server
        return
    engine = {
        "tensor_parallel_size": options.tp, "max_model_len": options.max_model_len,
        "dtype": options.dtype, "load_format": load_format, **vllm_options(options.serve_options),
    }  # fmt: skip
    with vllm_server(folder, engine, log, ",".join(gpus), options.num_workers) as server:
        yield server


def vllm_options(text: str) -> dict[str, Any]:
    """Options as a mapping, e.g. of `--quantization fp8 --enable-lora`."""
    found: dict[str, Any] = {}
    name = ""
    for word in text.split():
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = True
        else:
            found[name] = word
    return found


def rows_of(
    which: str,
    server: Server,
    folder: str,
    trainer: Trainer,
    gpus: list[str],
    options: argparse.Namespace,
) -> Iterator[Row]:
    """The rows of one server."""
    with ExitStack() as stack:
        memory = GpuMemory(gpus[0] if gpus else "")
        stack.callback(memory.close)
        # The first requests take memory of their own.
        for _ in range(2):
            server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 8})
        if trainer.adapter:
            trainer.adapter.load(server)
        memory.begin()
        updater: Updater = (
            Titopool(server, trainer) if which == "titopool" else Vllm(server, trainer)
        )
        for load in options.loads:
            repeats = options.repeats if load in ("idle", "keep") else min(3, options.repeats)
            with requests_in_flight(load, server, options):
                runs = measure(updater, trainer, load, repeats, memory)
            row = row_of(runs, server=updater.name, load=describe(load))
            yield {**row, "difference": trainer.largest_difference}
        updater.close()
        for package in map(Path, options.trl):
            if which == "vllm":
                # Earlier clients speak the wire of TRL's own server, and later ones need
                # `/server_info` as newer versions of vLLM have it.
                continue
            client = TrlTrainer(server, trainer, package, folder, options.dtype)
            try:
                runs = measure(client, trainer, "idle", min(5, options.repeats), memory)
            finally:
                client.close()
            name = f"{which}, client of TRL {package.name}"
            yield row_of(runs, server=name, load="idle")


def describe(load: str) -> str:
    return load if load == "idle" else f"{NUM_REQUESTS}, {load}"


def measure(
    updater: Updater, trainer: Trainer, load: str, repeats: int, memory: GpuMemory
) -> list[Row]:
    """One update, then `repeats` more, with the two models in turn, each checked."""
    runs: list[Row] = []
    firsts: dict[int, list[int]] = {}
    policy = "keep" if load == "idle" else load
    for turn in range(repeats + 1):
        model = trainer.last_sent = trainer.models[turn % 2]
        trainer.synchronize()
        began = time.monotonic()
        with trainer.peak_bytes() as peak:
            figures = updater.update(model, policy)
        run = {"total_s": time.monotonic() - began, **figures, "trainer_bytes": sum(peak)}
        runs.append({**run, "gpu_bytes": memory.peak()})
        ids = trainer.check(updater.server, model)
        if load == "idle":
            assert ids == firsts.setdefault(turn % 2, ids), "old weights gave other tokens"
    return runs


@contextmanager
def requests_in_flight(load: str, server: Server, options: argparse.Namespace) -> Iterator[None]:
    """Keeps requests in flight during the block, unless `load` is idle."""
    if load == "idle":
        yield
        return
    lengths = [SHORT_LEN, SHORT_LEN]
    if load == "keep":
        num_tokens = int(KV_IN_USE * kv_tokens(server) / NUM_REQUESTS)
        assert num_tokens < options.max_model_len, f"--max-model-len: expected over {num_tokens}"
        lengths = [num_tokens, options.max_model_len - num_tokens - 1]
    model = server.get("/v1/models").json()["data"][0]["id"]
    words = [server.url, model, str(NUM_REQUESTS), *map(str, lengths)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.weights.load", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    # The engine takes requests in their order: this one ends when those before it have begun.
    greedy(server, [PROMPT])
    try:
        yield
    finally:
        statuses = json.loads(process.communicate(timeout=60)[0].splitlines()[-1])
        print(f"{load}: statuses {statuses}", flush=True)
    assert set(statuses) <= {"200"}, statuses


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of each worker")
    parser.add_argument(
        "--trainer-gpu", type=int,
        help="index of a worker's GPU: shows that updates are right, over sockets, not how fast",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["idle"])
    parser.add_argument(
        "--trl", nargs="*", default=[], help="folders with trl, named by its version"
    )
    parser.add_argument("--lora", action="store_true", help="an adapter is loaded, and checked")
    parser.add_argument(
        "--fresh-start", action="store_true",
        help="the last update's tokens are those of a server that starts with its weights",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=10, help="updates after the first")
    parser.add_argument("--tolerance", type=float, default=0.5, help="of a log-probability")
    parser.add_argument("--serve-options", default="", help="further options of both servers")
    parser.add_argument("--out", default="weights.jsonl", help="rows are appended here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        # The others send over NCCL only.
        options.servers, options.trl = ["titopool"], []
    return options


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
