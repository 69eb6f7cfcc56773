"""One process of a trainer whose model is sharded by FSDP2, on CPUs.

    python -m tests.sharded_trainer RANK WORLD_SIZE FOLDER

Rank 0 packs the model and writes the messages to FOLDER/messages.pt. Then it tries to send them to a
server that does not exist. The other ranks take part in gathering, both times. Each rank writes
FOLDER/done-RANK at its end.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from titopool.client.packing import messages_of
from titopool.client.sources import Source
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


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    model = whole_model()
    mesh = dist.init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh)
    assert all(isinstance(one, DTensor) for one in model.parameters())
    if rank == 0:
        digest = Checksum()
        messages = list(messages_of(Source(model), CHUNK_BYTES, torch.device("cpu"), digest))
        torch.save((messages, digest.digest()), folder / "messages.pt")
        try:
            WeightsClient("http://127.0.0.1:1", device="cpu").update(model, policy="keep")
        except WeightsError:
            pass
        else:
            raise AssertionError("expected a WeightsError")
    else:
        join_update(model)
        join_update(model.named_parameters)
    # Both ranks are in step, so a barrier ends.
    dist.barrier()
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
