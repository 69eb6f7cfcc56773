"""A trainer that stops at a given step, for tests that kill it: `train` in a process of its own."""

import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from titopool.client.weights_client import WeightsClient
from titopool.settings.gpus import visible_gpus

CHUNK_BYTES = 2**18
# The last GPU: the workers use the first ones.
DEVICE = f"cuda:{len(visible_gpus()) - 1}" if visible_gpus() else "cpu"


def tensors_of(folder: str) -> list[tuple[str, Any]]:
    """The parameters of a checkpoint in float32, on the trainer's device."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


class StoppingClient(WeightsClient):
    """Waits to be killed at `stop_at`."""

    stop_at = ""
    reached: Connection

    def stop_if_at(self, step: str) -> None:
        if self.stop_at == step:
            self.reached.send(step)
            time.sleep(3600)

    def _send(self, messages: Any) -> None:
        self.stop_if_at("begun")
        super()._send(self._stop_after_one(messages))
        self._wait_for_sent(0)
        self.stop_if_at("sent")

    def _stop_after_one(self, messages: Any) -> Any:
        for number, message in enumerate(messages):
            if number:
                self.stop_if_at("sending")
            yield message


def train(url: str, folder: str, stop_at: str, reached: Connection) -> None:
    """Sends the weights in `folder`; at `stop_at` it says so to `reached`, and waits to be killed.

    Args:
        stop_at: joined, begun, sending (only the first chunk is sent) or sent.
    """
    tensors = tensors_of(folder)
    client = StoppingClient(url, device=DEVICE, chunk_bytes=CHUNK_BYTES)
    client.stop_at, client.reached = stop_at, reached
    client.open()
    client.stop_if_at("joined")
    client.update(tensors, policy="keep")
