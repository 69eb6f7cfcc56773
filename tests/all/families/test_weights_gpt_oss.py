"""Weight updates of GPT-OSS, whose loader bypasses the loaders of experts and sinks.

With two engine processes, between which tensors are divided.
"""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.servers import need_gpus, running_server, wait_until_ended
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models.model_families import make_family
from tests.kit.models.weights import assert_serves, weights_client
from tests.kit.trainers.trainer import tensors_of
from tests.kit.trainers.trl_weights_client import update_by_trl
from titopool.demo_model import make_tokenizer

EXPERTS = "model.layers.1.mlp."


def mixed(folder: Path, base: str, other: dict[str, Any]) -> str:
    """The model in `base` with some tensors of `other`."""
    folder.mkdir()
    make_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.load_state_dict(other, strict=False)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.timeout(1500)
def test_experts_and_sinks_are_exact_after_updates_in_both_directions(tmp_path: Path):
    need_gpus(3)
    original = make_family("gpt_oss", tmp_path / "own", 0)
    other = make_family("gpt_oss", tmp_path / "other", 1)
    options = (
        "--num-workers", "1", "--num-front-ends", "1", "--weights-root", str(tmp_path),
        "--tensor-parallel-size", "2", "--weight-update-timeout-s", "400",
        # Two engine processes that busy-wait for each other starve the rest of a two-core machine.
        "--heartbeat-timeout-s", "400",
        *ENGINE_OPTIONS,
    )  # fmt: skip
    with running_server(original, *options, log=tmp_path / "log") as server:
        assert server.get("/get_world_size/").json() == {"world_size": 2}
        client = weights_client(server, timeout_s=400)
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
