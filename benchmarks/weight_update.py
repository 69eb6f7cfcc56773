"""Seconds for a weight update: this server's protocol, TRL's client, and a bare NCCL broadcast.

    python -m benchmarks.weight_update --trl FOLDER                    # two GPUs: worker, trainer
    python -m benchmarks.weight_update --trl FOLDER --num-workers 2    # three
    python -m benchmarks.weight_update --shape tiny --num-workers 1    # no GPU: gloo, no TRL

This process is the trainer; it uses the GPU after the workers' GPUs. The server starts with dummy
weights. The trainer sends two sets of random weights in turn, in bfloat16. After each update it
compares the server's log-probabilities with transformers'. TRL's client runs unchanged in a separate
process. The bare broadcast sends as many bytes with torch, between processes on the same GPUs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.models import SHAPES, make_model
from tests.servers import REPOSITORY, Server, environment, free_port, running_server
from titopool.client.weights_client import WeightsClient

PROMPT = list(range(50, 82))
NUM_TOKENS = 16
# Between log-probabilities of two implementations of a random bfloat16 model. Other weights differ by
# several times as much.
TOLERANCE = 0.5


def main() -> None:
    options = parse_arguments()
    if options.bare_rank is not None:
        bare(options)
        return
    result: dict[str, Any] = {"machine": describe_machine(), **vars(options)}
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(options.shape, Path(name) / "model", with_weights=False)
        words = [
            "--num-workers", str(options.num_workers), "--tensor-parallel-size", str(options.tp),
            "--max-model-len", "2048", "--dtype", options.dtype, "--load-format", "dummy",
            *options.serve_options.split(),
        ]  # fmt: skip
        gpus = {"CUDA_VISIBLE_DEVICES": workers_gpus(options)} if options.device == "cuda" else {}
        log = Path(options.out + ".log")
        # Before the server, whose engine takes the GPU's memory.
        num_bytes = bytes_of(folder, options)
        result |= {"gigabytes": num_bytes / 1e9, "bare_s": run_bare(num_bytes, options)}
        print("bare", result["bare_s"], flush=True)
        with running_server(
            folder, *words, log=log, num_workers=options.num_workers, **gpus
        ) as server:
            result |= measure(server, folder, options)
    Path(options.out + ".json").write_text(json.dumps(result, indent=1) + "\n")
    Path(options.out + ".md").write_text(markdown(result))
    print(markdown(result), flush=True)


def measure(server: Server, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures for one server."""
    models = [random_model(folder, seed, options) for seed in (1, 2)]
    result: dict[str, Any] = {"ours": ours(server, models, options)}
    print(json.dumps(result["ours"]), flush=True)
    if options.trl:
        result["trl"] = run_trl_client(server, folder, models, options)
        print(json.dumps(result["trl"]), flush=True)
    return result


def random_model(folder: str, seed: int, options: argparse.Namespace) -> Any:
    """A random model with the config in `folder`, in the trainer's memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config, dtype = AutoConfig.from_pretrained(folder), getattr(torch, options.dtype)
    with trainer_device(options):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def bytes_of(folder: str, options: argparse.Namespace) -> int:
    """Bytes of the model's parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config, dtype = AutoConfig.from_pretrained(folder), getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(one.numel() * one.element_size() for one in model.parameters())


def trainer_device(options: argparse.Namespace) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", options.num_workers * options.tp)


def workers_gpus(options: argparse.Namespace) -> str:
    return ",".join(str(index) for index in range(options.num_workers * options.tp))


# ---- this server ---------------------------------------------------------------------


def ours(server: Server, models: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each update and of its steps, after one update that warms up."""
    client = TimedClient(server.url, device=trainer_device(options), timeout_s=120)
    began = time.monotonic()
    client.open()
    open_s = time.monotonic() - began
    began = time.monotonic()
    client.update(models[0].named_parameters(), policy="keep")
    first_s = time.monotonic() - began
    first = check(server, models[0])
    runs = []
    for turn in range(options.repeats + 1):
        model = models[(turn + 1) % 2]
        synchronize(options)
        began = time.monotonic()
        answer = client.update(model.named_parameters(), policy="keep")
        total_s = time.monotonic() - began
        parts = {key: answer[key] for key in ("prepare_s", "apply_s", "paused_s")}
        runs.append({"total_s": total_s, **client.seconds, **parts})
        check(server, model)
    client.update(models[0].named_parameters(), policy="keep", with_checksum=True)
    has_same_tokens = check(server, models[0]) == first
    client.close()
    same = {"old_weights_give_the_old_tokens": has_same_tokens}
    return {
        "open_s": open_s, "staging": answer["staging"], "first_s": first_s, **same,
        **medians(runs[1:]), "worst_s": max(run["total_s"] for run in runs[1:]), "runs": runs,
    }  # fmt: skip


class TimedClient(WeightsClient):
    """Measures the steps of the last update."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.seconds: dict[str, float] = {}

    def call(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        return self._timed(name, lambda: super(TimedClient, self).call(path, body, **options))

    def _send(self, messages: Any) -> None:
        self._timed("send", lambda: super(TimedClient, self)._send(messages))

    def _timed(self, name: str, do: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = do()
        self.seconds = {**self.seconds, f"{name}_s": time.monotonic() - began}
        return result


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def synchronize(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize(trainer_device(options))


@torch.inference_mode()
def check(server: Server, model: Any) -> list[int]:
    """Compares the log-probabilities of the server's greedy ids with the model's.

    Returns:
        The greedy ids of one prompt in a request of its own. In a batch bfloat16 can give others.
    """
    body = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "generation_kwargs": {"ignore_eos": True}}
    answer = server.generate([PROMPT] * 8, **body)
    for ids, entries in zip(answer["completion_ids"], answer["logprobs"], strict=True):
        input_ids = torch.tensor([PROMPT + ids], device=model.device)
        rows = torch.log_softmax(model(input_ids).logits[0].float(), dim=-1)
        for index, (token_id, entry) in enumerate(zip(ids, entries, strict=True)):
            expected = float(rows[len(PROMPT) + index - 1, token_id])
            assert abs(expected - entry[0]) < TOLERANCE, (index, expected, entry[0])
    # Another prompt: the prefix cache has keys and values of `PROMPT` that a batch has computed.
    alone: list[int] = server.generate([PROMPT[::-1]], **body)["completion_ids"][0]
    return alone


# ---- TRL's client --------------------------------------------------------------------

TRL_SCRIPT = """
import json, sys, time
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient

url, folder, dtype, device, repeats, port = sys.argv[1:]
torch.manual_seed(2)
with torch.device(f"cuda:{device}"):
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
client = VLLMClient(base_url=url, group_port=int(port), connection_timeout=20)
began = time.monotonic()
client.init_communicator(device=int(device))
open_s, totals = time.monotonic() - began, []
for _ in range(int(repeats) + 1):
    torch.cuda.synchronize(int(device))
    began = time.monotonic()
    client.update_model_params(model)
    client.reset_prefix_cache()
    totals.append(time.monotonic() - began)
print(json.dumps({"open_s": open_s, "totals_s": totals}), flush=True)
client.close_communicator()
"""


def run_trl_client(
    server: Server, folder: str, models: list[Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of `update_model_params` and `reset_prefix_cache` of TRL's unchanged client."""
    words = [
        server.url, folder, options.dtype, str(trainer_device(options).index),
        str(options.repeats), str(free_port()),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", TRL_SCRIPT, *words],
        env=environment(PYTHONPATH=str(options.trl), HF_HUB_OFFLINE="1"),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    check(server, models[1])
    return {**found, "total_s": statistics.median(found["totals_s"][1:])}


# ---- a bare broadcast ----------------------------------------------------------------


def run_bare(num_bytes: int, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of one broadcast of `num_bytes` from the trainer's GPU to the workers' GPUs."""
    size = options.num_workers * options.tp + 1
    port = str(free_port())
    words = [
        "--bare-bytes", str(num_bytes), "--bare-size", str(size), "--bare-port", port,
        "--device", options.device, "--repeats", str(options.repeats),
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weight_update", *words, "--bare-rank", str(rank)],
            env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    # The trainer's GPU is the last one.
    times: list[float] = json.loads(outputs[-1].splitlines()[-1])
    return {"median_s": statistics.median(times), "best_s": min(times)}


def bare(options: argparse.Namespace) -> None:
    """One rank of the bare broadcast."""
    import torch.distributed as dist

    rank, size = options.bare_rank, options.bare_size
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo", rank=rank, world_size=size,
        init_method=f"tcp://127.0.0.1:{options.bare_port}",
    )  # fmt: skip
    buffer = torch.zeros(options.bare_bytes, dtype=torch.uint8, device=device)
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else int
    times = []
    for _ in range(options.repeats + 2):
        dist.barrier()
        wait()
        began = time.monotonic()
        dist.broadcast(buffer, size - 1)
        wait()
        # Waits for the last rank, as an update does.
        dist.barrier()
        wait()
        times.append(time.monotonic() - began)
    print(json.dumps(times[2:]), flush=True)
    dist.destroy_process_group()


def markdown(result: dict[str, Any]) -> str:
    """The results as a table."""
    bare_s = result["bare_s"]["median_s"]
    rows = [("bare broadcast", bare_s), ("this server, update", result["ours"]["total_s"])]
    if trl := result.get("trl"):
        rows.append(("TRL's client, one call a parameter", trl["total_s"]))
    lines = [
        f"{result['shape']}, {result['dtype']}, {result['gigabytes']:.2f} GB, "
        f"{result['num_workers']} workers of {result['tp']} processes, median of {result['repeats']}",
        "",
        "| | seconds | times the broadcast |",
        "|---|---|---|",
        *(f"| {name} | {value:.4f} | {value / bare_s:.1f} |" for name, value in rows),
        "",
        f"This server ({result['ours']['staging']}): first {result['ours']['first_s']:.2f} s, worst "
        f"{result['ours']['worst_s']:.4f} s, generation paused {result['ours']['paused_s']:.4f} s, "
        f"begin {result['ours']['begin_s']:.4f} s, send {result['ours']['send_s']:.4f} s, "
        f"commit {result['ours']['commit_s']:.4f} s, of which {result['ours']['prepare_s']:.4f} s to "
        f"prepare and {result['ours']['apply_s']:.4f} s to apply.",
    ]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of each worker")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trl", help="folder with trl; without it TRL's client is not measured")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--serve-options", default="", help="further options of titopool serve")
    parser.add_argument(
        "--out", default="weight-update", help="path of the result files, without extension"
    )
    for name in ("rank", "size", "port", "bytes"):
        parser.add_argument(f"--bare-{name}", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
