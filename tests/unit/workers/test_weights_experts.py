"""Which tensors of mixture-of-experts models fit, with all experts of a layer in one tensor."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.kit.models.model_families import config_of
from titopool.wire.commands import TensorInfo
from workers.in_model.checkpoint_files import Refused
from workers.in_model.proof.catalogue import Catalogue
from workers.in_model.proof.conversion import Conversions, info_of

LAYER = "model.layers.1.mlp.experts"
BLOCK = "model.layers.1.block_sparse_moe"


def catalogue(kind: str) -> tuple[Catalogue, list[TensorInfo]]:
    """A model's catalogue, and its module's parameters."""
    conversions = Conversions(config_of(kind))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config_of(kind))
    parameters = [info_of(*item) for item in module.named_parameters()]
    blocks = [BLOCK] if kind == "granite" else []
    known = Catalogue(conversions.checkpoint(), conversions=conversions, blocks=blocks)
    return known, parameters


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_experts_of_a_layer_must_be_sent_together(kind: str):
    known, parameters = catalogue(kind)
    assert known.fit(parameters, is_partial=False).missing == []
    # Of the last layer; the first ones may be dense.
    gate_up = [one for one in parameters if one.name.endswith(".experts.gate_up_proj")][-1:]
    layer = gate_up[0].name.removesuffix(".gate_up_proj")
    split = known.fit(gate_up, is_partial=True).split_layers
    assert len(split) == 4
    assert all(name.startswith(layer.partition(".mlp.")[0]) for name in split)
    assert {name.rpartition(".experts.")[2].split(".")[1] for name in split} <= {"down_proj", "w2"}
    with pytest.raises(Refused, match="twice"):
        known.fit(gate_up * 2, is_partial=True)
    with pytest.raises(Refused, match="no such tensor"):
        known.fit([TensorInfo(f"{layer}.gate_proj", "float32", [4, 64, 128])], is_partial=True)
    with pytest.raises(Refused, match="expected shape"):
        known.fit([TensorInfo(gate_up[0].name, "float32", [4, 64, 128])], is_partial=True)


def test_experts_in_one_tensor_must_be_sent_with_their_block():
    known, parameters = catalogue("granite")
    assert known.fit(parameters, is_partial=False).missing == []
    gate_up = [one for one in parameters if one.name == f"{BLOCK}.experts.gate_up_proj"]
    assert sorted(known.fit(gate_up, is_partial=True).split_layers) == [
        f"{BLOCK}.output_linear.weight",
        f"{BLOCK}.router.layer.weight",
    ]


def test_layers_that_predict_further_tokens_are_ignored():
    names = ["model.layers.0.w", "model.layers.1.w", "vision.layers.2.w", "mtp.layers.0.w"]
    infos = [TensorInfo(name, "float32", [2]) for name in names]
    modules = ["model", "model.layers", "model.layers.0", "vision"]
    known = Catalogue(infos, modules=modules)
    assert known.fit([infos[0], infos[2]], is_partial=False).missing == []
    assert known.fit(infos, is_partial=False).ignored == ["model.layers.1.w", "mtp.layers.0.w"]
    known = Catalogue(infos, modules=[*modules, "model.layers.1", "mtp"])
    assert known.fit(infos, is_partial=False).ignored == []
    # A name that is missing in the checkpoint too is a mistake.
    with pytest.raises(Refused, match="no such tensor"):
        known.fit([*infos, TensorInfo("model.layers.7.w", "float32", [2])], is_partial=False)


def test_a_tensor_sent_alone_and_within_another_is_refused():
    known, parameters = catalogue("qwen3_moe")
    part = TensorInfo(f"{LAYER}.0.gate_proj.weight", "float32", [64, 128])
    with pytest.raises(Refused, match="twice"):
        known.fit([*parameters, part], is_partial=False)
