"""One process of a trainer whose model is sharded by FSDP2, on CPUs.

    python -m tests.kit.trainers.sharded_trainer RANK WORLD_SIZE FOLDER

Rank 0 packs the model and writes the messages to FOLDER/messages.pt. Then it tries to send them to a
server that does not exist. Last it packs a model with an adapter of PEFT, for FOLDER/adapted.pt. The
other ranks take part in gathering, each time. Each rank writes FOLDER/done-RANK at its end.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from titopool.client.weights.packing import messages_of
from titopool.client.weights.sources import Source
from titopool.weights_client import WeightsClient, WeightsError, join_update
from titopool.wire.weight_plan import Checksum

CHUNK_BYTES = 100
TIMEOUT = timedelta(seconds=60)


def whole_model() -> Any:
    """The model before it is sharded, the same in every process."""
    torch.manual_seed(1)
    # Sizes that two processes do not share evenly.
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False))
    model.scale = torch.nn.Parameter(torch.randn(9).to(torch.bfloat16))
    return model


def adapted_model() -> Any:
    """The same with a random adapter."""
    model = get_peft_model(whole_model(), LoraConfig(r=3, target_modules=["0", "1"]))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.normal_()
    return model


def packed(model: Any) -> tuple[list[Any], int]:
    """The messages of a model, and their checksum."""
    digest = Checksum()
    messages = list(messages_of(Source(model), CHUNK_BYTES, torch.device("cpu"), digest))
    return messages, digest.digest()


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    model = whole_model()
    mesh = dist.init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh)
    adapted = adapted_model()
    fully_shard(adapted, mesh=mesh)
    for one in (*model.parameters(), *adapted.parameters()):
        assert isinstance(one, DTensor)
    if rank == 0:
        torch.save(packed(model), folder / "messages.pt")
        try:
            WeightsClient("http://127.0.0.1:1", device="cpu").update(model, policy="keep")
        except WeightsError:
            pass
        else:
            raise AssertionError("expected a WeightsError")
        torch.save(packed(adapted), folder / "adapted.pt")
    else:
        join_update(model)
        join_update(model.named_parameters)
        join_update(adapted)
    # Both ranks are in step, so a barrier ends.
    dist.barrier()
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
