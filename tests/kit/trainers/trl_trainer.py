"""TRL's GRPOTrainer, as published, runs one of the examples; on CPUs gloo replaces NCCL.

    python -m tests.kit.trainers.trl_trainer TASK MODEL URL STEPS [GOAL]     # PYTHONPATH has the package trl

Prints what benchmarks/trl_training/timed.py prints. Ends before STEPS once the mean reward of the
last three steps is above GOAL.
"""

import importlib
import sys
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.trl_training import timed
from tests.kit.trainers import stock_trainer
from tests.kit.trainers.trl_weights_client import WITHOUT_GPU


def open_endpoint(info: dict[str, Any]) -> stock_trainer.GlooCommunicator:
    """In the place of vLLM's `trainer_init`."""
    from vllm.distributed.utils import StatelessProcessGroup

    address, port, size = info["master_address"], info["master_port"], info["world_size"]
    group = StatelessProcessGroup.create(address, port, 0, size, store_timeout=60)
    return stock_trainer.GlooCommunicator(group)


def produce(iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
    """In the place of vLLM's `packed_nccl_broadcast_producer`."""
    from vllm.distributed.weight_transfer import packed_tensor

    stock_trainer.send(group, iterator, packed_tensor.DEFAULT_PACKED_BUFFER_SIZE_BYTES)


def replace_nccl_of_async_trainer() -> None:
    """The same for the asynchronous trainer of TRL 1.16, whose client is another."""
    from trl.experimental.async_grpo import vllm_client, weight_transfer

    join = vllm_client.VLLMClient.init_weight_transfer_engine

    def join_with_gloo(self: Any, init_info: dict[str, Any], timeout: int) -> None:
        join(self, {**init_info, "backend": "gloo"}, timeout)

    vllm_client.VLLMClient.init_weight_transfer_engine = join_with_gloo
    weight_transfer.open_trainer_endpoint = open_endpoint
    weight_transfer.packed_nccl_broadcast_producer = produce


def replace_nccl() -> None:
    """TRL 1.11 and later build NCCL's group through vLLM; earlier ones do it themselves."""
    if tuple(map(int, version("trl").split(".")[:2])) < (1, 11):
        exec(WITHOUT_GPU, {})
        return
    from trl.generation import vllm_client

    client = vllm_client.VLLMClient
    join, post = client.init_communicator, client._post

    def post_with_gloo(self: Any, url: str, **options: Any) -> Any:
        if url.endswith("/init_weight_transfer_engine"):
            # A server on CPUs refuses a trainer that does not say so.
            options["json"]["init_info"]["backend"] = "gloo"
        return post(self, url, **options)

    # TRL asks for a GPU, and uses it only through what is replaced here.
    client.init_communicator = lambda self, device: join(self, torch.device("cuda"))
    client._post = post_with_gloo
    vllm_client.open_trainer_endpoint = open_endpoint
    vllm_client.packed_nccl_broadcast_producer = produce


def stop_at(goal: float, task: str) -> None:
    """Lets the trainers that the example makes stop once they have learned so much."""
    from transformers import TrainerCallback

    class StopAtGoal(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            rewards = [one["reward"] for one in state.log_history if "reward" in one][-3:]
            control.should_training_stop |= len(rewards) == 3 and sum(rewards) / 3 > goal

    example = importlib.import_module(f"examples.{task}")
    make = example.make_trainer

    def make_trainer(*args: Any) -> Any:
        trainer = make(*args)
        trainer.add_callback(StopAtGoal())
        return trainer

    example.make_trainer = make_trainer


if __name__ == "__main__":
    if len(sys.argv) == 6:
        stop_at(float(sys.argv.pop()), sys.argv[1])
    if not torch.cuda.is_available():
        replace_nccl()
    timed.main()
