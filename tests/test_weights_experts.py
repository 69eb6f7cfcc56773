"""Weight updates of mixture-of-experts models with all experts of a layer in one tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from tests.conftest import ENGINE_OPTIONS
from tests.servers import need_gpus, running_server
from tests.trainer import tensors_of
from tests.trl_weights_client import update_by_trl
from tests.weights import assert_serves, weights_client
from titopool.client.weights_client import WeightsError
from titopool.demo_model import VOCAB_SIZE, make_tokenizer
from titopool.wire.commands import TensorInfo
from workers.in_model.catalogue import Catalogue
from workers.in_model.checkpoint_files import Refused
from workers.in_model.conversion import Conversions, info_of

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts_per_tok": 2, "max_position_embeddings": 2048, "initializer_range": 0.1,
    "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LAYER = "model.layers.1.mlp.experts"
BIAS = "e_score_correction_bias"


def config_of(kind: str) -> Any:
    """A tiny config of the model family `kind`.

    Qwen3-MoE's checkpoints name the tensors of an expert gate, up and down; Mixtral's w1, w3 and
    w2. GLM-4 has a dense layer, shared experts, a buffer that corrects scores, and a layer that
    predicts a further token. Granite's checkpoints have all experts in one tensor.
    """
    if kind == "qwen":
        return Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=64)
    if kind == "mixtral":
        return MixtralConfig(**SHAPE, num_local_experts=4)
    if kind == "granite":
        return GraniteMoeConfig(**SHAPE, num_local_experts=4)
    return Glm4MoeConfig(
        **SHAPE, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=64,
        first_k_dense_replace=1, num_nextn_predict_layers=1,
    )  # fmt: skip


def make_model(kind: str, folder: Path, seed: int) -> str:
    folder.mkdir()
    make_tokenizer(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):
            buffer.copy_(torch.randn(4) * 0.2)
    model.save_pretrained(folder)
    if kind == "glm":
        # Used neither by the trainer's module nor by vLLM.
        save_file({"model.layers.2.eh_proj.weight": torch.ones(2, 2)}, folder / "more.safetensors")
    return str(folder)


def state_of(folder: str) -> list[tuple[str, Any]]:
    """All tensors of a trainer's module, buffers included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return list(model.state_dict().items())


@pytest.mark.parametrize("kind", ["qwen", "mixtral", "glm"])
def test_experts_may_be_sent_as_in_the_module_or_the_checkpoint(kind: str, tmp_path: Path):
    need_gpus(2)
    original = make_model(kind, tmp_path / "own", 0)
    other = make_model(kind, tmp_path / "other", 1)
    options = (
        "--num-workers", "1", "--num-front-ends", "1", "--weights-root", str(tmp_path),
        *ENGINE_OPTIONS,
    )  # fmt: skip
    new = state_of(other)
    assert any(name == f"{LAYER}.gate_up_proj" for name, _ in new)
    with running_server(original, *options, log=tmp_path / "log") as server:
        client = weights_client(server, timeout_s=30)
        assert_serves(server, original)
        with pytest.raises(WeightsError, match=r"gate_up_proj: expected shape \[4, "):
            client.update(
                [(name, one[:2] if "gate_up" in name else one) for name, one in new], policy="keep"
            )
        assert_serves(server, original)
        result = client.update(new, policy="keep")
        assert (result["missing"], result["ignored"], result["kept"]) == ([], [], [])
        assert_serves(server, other)
        # The experts stay unchanged; one layer without the rest of its block is refused.
        client.update(
            [one for one in new if one[0] == "model.norm.weight"], policy="keep", partial=True
        )
        assert_serves(server, other)
        with pytest.raises(WeightsError, match=r"send these too: .*experts\.0\."):
            client.update(
                [one for one in new if one[0].endswith("mlp.gate.weight")],
                policy="keep",
                partial=True,
            )
        kept = client.update(tensors_of(other), policy="keep")["kept"]
        assert [name.rpartition(".")[2] for name in kept] == ([BIAS] if kind == "glm" else [])
        assert_serves(server, other)
        client.update_from_folder(original, policy="keep")
        assert_serves(server, original)
        if kind == "qwen":
            client.close()
            update_by_trl(server.url, other)
            assert_serves(server, other)


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


@pytest.mark.parametrize("kind", ["qwen", "mixtral", "glm"])
def test_experts_of_a_layer_must_be_sent_together(kind: str):
    known, parameters = catalogue(kind)
    assert known.fit(parameters, is_partial=False).missing == []
    gate_up = [one for one in parameters if one.name == f"{LAYER}.gate_up_proj"]
    split = known.fit(gate_up, is_partial=True).split_layers
    assert len(split) == 4
    assert all("layers.1" in name for name in split)
    assert {name.rpartition(".experts.")[2].split(".")[1] for name in split} <= {"down_proj", "w2"}
    with pytest.raises(Refused, match="twice"):
        known.fit(gate_up * 2, is_partial=True)
    with pytest.raises(Refused, match="no such tensor"):
        known.fit([TensorInfo(f"{LAYER}.gate_proj", "float32", [4, 64, 128])], is_partial=True)
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
    known, parameters = catalogue("qwen")
    part = TensorInfo(f"{LAYER}.0.gate_proj.weight", "float32", [64, 128])
    with pytest.raises(Refused, match="twice"):
        known.fit([*parameters, part], is_partial=False)
