"""What a synchronous trainer sees when a worker is killed while it sends: two GPUs.

    python -m benchmarks.weights.lost_worker [--wait-s 60]

A trainer with vLLM's own code (`packed_nccl_broadcast_producer`) makes one whole update of a small
model, begins another, and the worker's engine is killed before its broadcast. Prints a line of JSON
each for the answer of /update_weights, for how the trainer's calls ended, for the server's state, and
for the update of a new trainer afterwards, with the seconds since the kill.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.models import make_model
from harness.servers import Server, free_port, wait_until

KILL_DELAY_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wait-s", type=float, default=60, help="for the trainer's broadcast")
    parser.add_argument("--trainer", nargs=3, metavar=("URL", "FOLDER", "KILL"))
    options = parser.parse_args()
    if options.trainer:
        send(*options.trainer)
        return
    from benchmarks.weights.updaters import titopool_server
    from titopool.settings.gpus import visible_gpus

    gpu, _ = visible_gpus()[:2]
    with tempfile.TemporaryDirectory() as name:
        folder = make_model("qwen3-0.6b", Path(name) / "model", with_weights=False)
        words = ["--num-workers", "1", "--max-model-len", "4096", "--load-format", "dummy"]
        with titopool_server(folder, words, Path(name) / "log", gpu) as server:
            run_trainer(server, folder, "kill", options.wait_s)
            show("weights afterwards", **server.get("/weights").json())
            # It serves only after a complete update.
            wait_until(lambda: "unreachable" not in server.get("/weights").text, 300)
            run_trainer(server, folder, "no", options.wait_s)
            log = [line for line in server.log.splitlines() if "eight" in line]
            show("log", lines=log[-12:])


def run_trainer(server: Server, folder: str, kill: str, wait_s: float) -> None:
    words = [sys.executable, "-m", "benchmarks.weights.lost_worker", "--trainer", server.url]
    process = subprocess.Popen([*words, folder, kill])
    try:
        status = process.wait(wait_s + 60)
    except subprocess.TimeoutExpired:
        # Python's stacks say where it waits.
        process.send_signal(signal.SIGABRT)
        status = process.wait(20)
        show("the trainer was killed: no end", waited_s=wait_s + 60)
    show("trainer", status=status)


def send(url: str, folder: str, kill: str) -> None:
    """The trainer's process."""
    import faulthandler
    import threading

    import requests
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm.distributed.weight_transfer.nccl_common import trainer_init
    from vllm.distributed.weight_transfer.packed_tensor import (
        DEFAULT_PACKED_BUFFER_SIZE_BYTES,
        DEFAULT_PACKED_NUM_BUFFERS,
        packed_nccl_broadcast_producer,
    )

    faulthandler.enable()
    torch.cuda.set_device(1)
    with torch.device("cuda", 1):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = [(name, one.detach()) for name, one in model.named_parameters()]
    names = [name for name, _ in tensors]
    kinds = [str(one.dtype).removeprefix("torch.") for _, one in tensors]
    shapes = [list(one.shape) for _, one in tensors]
    update = {"names": names, "dtype_names": kinds, "shapes": shapes}
    began = time.monotonic()

    def call(path: str, body: Any) -> None:
        answer = requests.post(url + path, json=body, timeout=300)
        show(path, status=answer.status_code, text=answer.text[:600], s=time.monotonic() - began)

    def beside(path: str, body: Any) -> threading.Thread:
        thread = threading.Thread(target=call, args=(path, body), daemon=True)
        thread.start()
        return thread

    init = {
        "master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1,
        "world_size": 2, "packed": True,
    }  # fmt: skip
    joined = beside("/init_weight_transfer_engine", {"init_info": init})
    group = trainer_init(init)
    joined.join()
    for is_last in (False, True):
        call("/start_weight_update", {})
        answered = beside("/update_weights", {"update_info": update})
        if is_last and kill == "kill":
            time.sleep(KILL_DELAY_S)
            kill_engine()
            began = time.monotonic()
            faulthandler.dump_traceback_later(20, exit=False)
        packed_nccl_broadcast_producer(
            iterator=iter(tensors), group=group, src=0, post_iter_func=lambda item: item[1],
            buffer_size_bytes=DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
        )  # fmt: skip
        show("the broadcast returned", s=time.monotonic() - began)
        torch.cuda.synchronize()
        show("the GPU finished the broadcast", s=time.monotonic() - began)
        answered.join()
        call("/finish_weight_update", {})
    os._exit(0)


def kill_engine() -> None:
    """Kills vLLM's engine process below the server that is this process's parent's child."""
    above = psutil.Process().parent()
    assert above is not None
    (engine,) = [
        one for one in above.children(recursive=True) if "EngineCore" in " ".join(one.cmdline())
    ]
    engine.kill()
    show("killed", process=engine.pid)


def show(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, **fields}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
