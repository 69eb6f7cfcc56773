"""A trainer that stops at a given step, for tests that kill it.

    python -m tests.kit.trainers.trainer URL FOLDER joined|begun|sending|sent

It prints the word when it has reached the step, and waits to be killed. With `sending`, it has sent
only the first chunk.
"""

import sys
import time
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


def stop(word: str) -> None:
    print(word, flush=True)
    time.sleep(3600)


class StoppingClient(WeightsClient):
    """Waits to be killed at `stop_at`."""

    stop_at = ""

    def _send(self, messages: Any) -> None:
        if self.stop_at == "begun":
            stop("begun")
        super()._send(self._stop_after_one(messages))
        self._wait_for_sent(0)
        stop("sent")

    def _stop_after_one(self, messages: Any) -> Any:
        for number, message in enumerate(messages):
            if number and self.stop_at == "sending":
                stop("sending")
            yield message


def main() -> None:
    url, folder, stop_at = sys.argv[1:]
    tensors = tensors_of(folder)
    client = StoppingClient(url, device=DEVICE, chunk_bytes=CHUNK_BYTES)
    client.stop_at = stop_at
    client.open()
    if stop_at == "joined":
        stop("joined")
    client.update(tensors, policy="keep")


if __name__ == "__main__":
    main()
