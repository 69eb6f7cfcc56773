"""One broadcast of as many bytes with torch, between processes on the same GPUs."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from harness.servers import REPOSITORY, environment, free_port


def bare_seconds(num_bytes: int, *, size: int, on_gpu: bool, repeats: int) -> list[float]:
    """Seconds of each broadcast from the last of `size` processes to the others."""
    words = [
        "--bytes", str(num_bytes), "--size", str(size), "--port", str(free_port()),
        "--repeats", str(repeats), *(["--gpu"] if on_gpu else []),
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weights.bare", *words, "--rank", str(rank)],
            env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    times: list[float] = json.loads(outputs[-1].splitlines()[-1])
    return times


def main() -> None:
    """One rank."""
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    for name in ("bytes", "size", "port", "repeats", "rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.gpu:
        device = torch.device("cuda", options.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if options.gpu else "gloo", rank=options.rank, world_size=options.size,
        init_method=f"tcp://127.0.0.1:{options.port}",
    )  # fmt: skip
    buffer = torch.zeros(options.bytes, dtype=torch.uint8, device=device)
    wait: Callable[[], object] = torch.cuda.synchronize if options.gpu else int
    times = []
    for _ in range(options.repeats + 2):
        dist.barrier()
        wait()
        began = time.monotonic()
        dist.broadcast(buffer, options.size - 1)
        wait()
        # Waits for the last rank, as an update does.
        dist.barrier()
        wait()
        times.append(time.monotonic() - began)
    print(json.dumps(times[2:]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
