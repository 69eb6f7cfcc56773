"""Weight updates of GPT-OSS, whose loader bypasses the loaders of experts and sinks.

With one engine process and with two, between which tensors are divided.
"""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from tests.conftest import ENGINE_OPTIONS
from tests.servers import need_gpus, running_server, wait_until_ended
from tests.trainer import tensors_of
from tests.trl_weights_client import update_by_trl
from tests.weights import assert_serves, weights_client
from titopool.demo_model import VOCAB_SIZE, make_tokenizer

EXPERTS = "model.layers.1.mlp."


def make_model(folder: Path, seed: int) -> str:
    folder.mkdir()
    make_tokenizer(folder)
    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=512, sliding_window=64,
        initializer_range=0.1, eos_token_id=0, pad_token_id=0,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 256, "truncate": False,
        },
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            # transformers initialises these with zero; old values would go unnoticed.
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return str(folder)


def mixed(folder: Path, base: str, other: dict[str, Any]) -> str:
    """The model in `base` with some tensors of `other`."""
    folder.mkdir()
    make_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.load_state_dict(other, strict=False)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_experts_and_sinks_are_exact_after_updates_in_both_directions(
    num_processes: int, tmp_path: Path
):
    need_gpus(num_processes + 1)
    original, other = make_model(tmp_path / "own", 0), make_model(tmp_path / "other", 1)
    options = (
        "--num-workers", "1", "--num-front-ends", "1", "--weights-root", str(tmp_path),
        "--tensor-parallel-size", str(num_processes), "--weight-update-timeout-s", "120",
        # Two engine processes that busy-wait for each other starve the rest of a two-core machine.
        "--heartbeat-timeout-s", "120",
        *ENGINE_OPTIONS,
    )  # fmt: skip
    with running_server(original, *options, log=tmp_path / "log") as server:
        assert server.get("/get_world_size/").json() == {"world_size": num_processes}
        client = weights_client(server, timeout_s=120)
        assert_serves(server, original)
        for folder in (other, original, other):
            result = client.update(tensors_of(folder), policy="keep", with_checksum=True)
            assert result["missing"] == result["ignored"] == []
            assert_serves(server, folder)
        experts = {name: one for name, one in tensors_of(original) if name.startswith(EXPERTS)}
        client.update(list(experts.items()), policy="keep", partial=True)
        assert_serves(server, mixed(tmp_path / "mixed", other, experts))
        client.update_from_folder(original, policy="keep")
        assert_serves(server, original)
        client.close()
        update_by_trl(server.url, other)
        answer = assert_serves(server, other)
        assert answer["weight_versions"] == [[[6, 0]]]
        # No process outlives the master.
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        wait_until_ended(children)
