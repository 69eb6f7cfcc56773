"""The repairs of vLLM's classes, with the faults of earlier versions staged."""

from typing import Any

import pytest
import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from workers.in_model.vllm_fixes import keep_masks_apart, load_below_adapters

VOCAB_SIZE = 16


@pytest.fixture
def repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """`InputBatch` as vLLM's process that holds the model has it, until the test's end."""
    for name in ("add_request", "swap_states"):
        monkeypatch.setattr(InputBatch, name, getattr(InputBatch, name))
    keep_masks_apart()


def make_batch() -> Any:
    return InputBatch(
        max_num_reqs=4, max_model_len=32, max_num_batched_tokens=32, device=torch.device("cpu"),
        vocab_size=VOCAB_SIZE, block_sizes=[16], max_num_blocks_per_req=[2],
    )  # fmt: skip


def request(name: str, allowed: list[int] | None = None) -> Any:
    return CachedRequestState(
        req_id=name, prompt_token_ids=[1], mm_features=[],
        sampling_params=SamplingParams(allowed_token_ids=allowed), generator=None,
        block_ids=([],), num_computed_tokens=0, output_token_ids=[],
    )  # fmt: skip


def forbidden(batch: Any, name: str) -> list[int]:
    """The ids that the mask forbids the request."""
    row = batch.allowed_token_ids_mask_cpu_tensor[batch.req_id_to_index[name]]
    return torch.nonzero(row).flatten().tolist()


@pytest.mark.usefixtures("repaired")
def test_a_request_does_not_inherit_a_mask():
    batch = make_batch()
    batch.add_request(request("limited", allowed=[13]))
    # As after a move that leaves the mask in the old row.
    batch.allowed_token_ids_mask_cpu_tensor[1] = True
    batch.add_request(request("free"))
    assert forbidden(batch, "free") == []
    assert forbidden(batch, "limited") == [one for one in range(VOCAB_SIZE) if one != 13]


@pytest.mark.usefixtures("repaired")
def test_masks_of_swapped_requests_are_swapped():
    batch = make_batch()
    batch.add_request(request("limited", allowed=[13]))
    batch.add_request(request("free"))
    batch.swap_states(0, 1)
    assert forbidden(batch, "free") == []
    assert forbidden(batch, "limited") == [one for one in range(VOCAB_SIZE) if one != 13]


def test_a_layer_with_lora_loads_the_weights_below(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(BaseLayerWithLoRA, "load_weights")
    layer = BaseLayerWithLoRA()
    layer.base_layer = torch.nn.Linear(2, 3, bias=False)
    model = torch.nn.ModuleDict({"layer": layer})
    tensor = torch.arange(6.0).reshape(3, 2)
    with pytest.raises(ValueError, match="no module or parameter"):
        AutoWeightsLoader(model).load_weights([("layer.weight", tensor)])
    load_below_adapters()
    AutoWeightsLoader(model).load_weights([("layer.weight", tensor)])
    assert torch.equal(layer.base_layer.weight, tensor)
