"""The trainer's side of vLLM's weight transfer, as vLLM's own code does it, with gloo in NCCL's place.

The rendezvous is vLLM's `StatelessProcessGroup`, the chunks are those of vLLM's `pack_tensors`. Only
`PyNcclCommunicator`, which needs a GPU, has a stand-in.
"""

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from titopool.wire.rendezvous import GLOO_PREFIX

# Of each step.
TIMEOUT_S = 60


class GlooCommunicator:
    """Stands in for vLLM's `PyNcclCommunicator`, at rank 0."""

    def __init__(self, group: Any, nccl_id: bytes = bytes(range(128))):
        """Sends `nccl_id` as vLLM sends it, although gloo needs none, and forms the group."""
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self.group = group
        group.broadcast_obj(unique_id(nccl_id), src=0)
        store = PrefixStore(GLOO_PREFIX, group.store)
        limit = timedelta(seconds=TIMEOUT_S)
        self._gloo = ProcessGroupGloo(store, group.rank, group.world_size, limit)

    def broadcast(self, tensor: Any, src: int) -> None:
        """Returns when `tensor` is sent. As with NCCL, an empty one sends nothing."""
        from torch.distributed import BroadcastOptions

        if tensor.numel():
            options = BroadcastOptions()
            options.rootRank = src
            self._gloo.broadcast([tensor], options).wait()


def unique_id(nccl_id: bytes) -> Any:
    """vLLM's structure with these bytes."""
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    return ncclUniqueId.from_buffer_copy(nccl_id)


def load_vllm() -> None:
    """Imports vLLM, which takes seconds, so that the trainer listens at once afterwards."""
    importlib.import_module("vllm.distributed.utils")


def stateless_group(port: int, world_size: int) -> Any:
    """vLLM's group of a trainer that listens at `port`; waits until all ranks are registered."""
    from vllm.distributed.utils import StatelessProcessGroup

    return StatelessProcessGroup.create("127.0.0.1", port, 0, world_size, store_timeout=TIMEOUT_S)


def communicator(port: int, world_size: int, device: str) -> Any:
    """The communicator of a trainer that listens at `port`: vLLM's on a GPU, else its stand-in."""
    group = stateless_group(port, world_size)
    if device == "cpu":
        return GlooCommunicator(group)
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    return PyNcclCommunicator(group, device=device)


def packed_chunks(tensors: Iterable[tuple[str, Any]], chunk_bytes: int) -> Iterator[Any]:
    """The chunks of vLLM's `packed_nccl_broadcast_producer`, uint8 of shape (bytes,)."""
    pack_tensors = packed_tensor_module().pack_tensors
    iterator = iter(tensors)
    while True:
        with warnings.catch_warnings():
            # vLLM warns of a tensor that is larger than a chunk.
            warnings.simplefilter("ignore")
            chunk = pack_tensors(iterator, lambda item: item[1], chunk_bytes)
        if chunk is None:
            return
        yield chunk.packed_tensor


@functools.cache
def packed_tensor_module() -> Any:
    """vLLM's `distributed/weight_transfer/packed_tensor.py`, which needs torch only.

    Loaded from its file, because its package imports half of vLLM, which takes 5 s.
    """
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "distributed" / "weight_transfer" / "packed_tensor.py"
    spec = importlib.util.spec_from_file_location("vllm_packed_tensor", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look for their module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def send(communicator: Any, tensors: Iterable[tuple[str, Any]], chunk_bytes: int) -> None:
    """Sends as vLLM's trainer does: packed, or with 0 each tensor in its own dtype."""
    messages = (
        packed_chunks(tensors, chunk_bytes)
        if chunk_bytes
        else (tensor.contiguous() for _, tensor in tensors)
    )
    for message in messages:
        communicator.broadcast(message, src=0)
