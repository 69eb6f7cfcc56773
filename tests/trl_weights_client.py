"""TRL's client updating weights over gloo: its own code, with NCCL's communicator replaced.

Where there is no GPU, `PyNcclCommunicator` is the only thing that cannot run; its stand-in
broadcasts through gloo, on the same store. Scripts find `client`, `tensors(folder)`, `module(folder)`
and `answer`.
"""

from typing import Any

from tests.trl_client import run_trl

SETUP = """
import os, types
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import datetime, torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo
import trl.generation.vllm_client as vllm_client
from transformers import AutoModelForCausalLM
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
# TRL's own is one that any connection of this machine may have got; the same in all scripts, as
# each takes the place of the one before.
client.group_port = 27_000 + os.getppid() % 1000
uuid = os.environ.get("TRAINER_UUID", "GPU-of-the-trainer")
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=uuid)


def module(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tensors(folder):
    return list(module(folder).named_parameters())
"""


def run_trl_weights(version: str, url: str, script: str) -> Any:
    """What `script` gives to `answer(…)` after `SETUP`."""
    return run_trl(version, url, SETUP + script)
