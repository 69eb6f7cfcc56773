"""TRL's client for weight updates: its own code; without a GPU, gloo replaces NCCL's communicator.

Without a GPU, only `PyNcclCommunicator` cannot run; its stand-in broadcasts through gloo, with the
same store. Scripts have `client`, `device`, `tensors(folder)`, `module(folder)` and `answer`.
"""

import os
from typing import Any

from tests.kit.peers.trl_client import run_trl
from tests.kit.trainers.trainer import DEVICE

WITHOUT_GPU = """
import os, types
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import datetime, torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo
import trl.generation.vllm_client as vllm_client
from vllm.distributed.utils import StatelessProcessGroup


class GlooCommunicator:
    def __init__(self, group, device):
        self.group = group
        store = PrefixStore("titopool/gloo", group.store)
        limit = datetime.timedelta(seconds=30)
        self.gloo = ProcessGroupGloo(store, group.rank, group.world_size, limit)

    def broadcast(self, tensor, src):
        options = BroadcastOptions()
        options.rootRank = src
        self.gloo.broadcast([tensor.contiguous()], options).wait()


vllm_client.StatelessProcessGroup = StatelessProcessGroup
vllm_client.PyNcclCommunicator = GlooCommunicator
uuid = "GPU-of-the-trainer"
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=uuid)
device, place = 0, "cpu"
"""

WITH_GPU = f"""
place = {DEVICE!r}
device = int(place.partition(":")[2] or 0)
"""

# Any connection of this machine may occupy TRL's default port. All scripts use the same port, as
# each client replaces the previous one.
GROUP_PORT = 27_000 + os.getpid() % 1000
SETUP = f"""
import os
import torch
from transformers import AutoModelForCausalLM

client.group_port = {GROUP_PORT}


def module(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(place)


def tensors(folder):
    return list(module(folder).named_parameters())
"""


def run_trl_weights(version: str, url: str, script: str) -> Any:
    """The value that `script` passes to `answer(…)` after `SETUP`."""
    setup = WITHOUT_GPU if DEVICE == "cpu" else WITH_GPU
    return run_trl(version, url, setup + SETUP + script)


def update_by_trl(url: str, folder: str, *, before: str = "") -> None:
    """One update by TRL's client to the weights in `folder`, after the script `before`."""
    script = f"""
client.init_communicator(device=device)
client.update_model_params(module({folder!r}))
client.reset_prefix_cache()
client.close_communicator()
answer(None)
"""
    run_trl_weights("1.9.2", url, before + script)
