"""A trainer's updates while workers join and leave, with real engines."""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from harness.servers import wait_until
from tests.conftest import ENGINE_OPTIONS
from titopool.client.weights_client import WeightsClient

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]


def versions(server) -> list[tuple[str, int]]:
    found = server.get("/ready").json()["workers"]
    return [(one["phase"], one["weight_version"]) for one in found]


def logprobs(server) -> np.ndarray:
    """Of greedy completions; each prompt several times, so that all workers have some."""
    answer = server.generate(PROMPTS * 4, max_tokens=4, temperature=0)
    return np.array(answer["logprobs"])


def test_updates_reach_workers_that_join_and_do_not_wait_for_one_that_loads(
    start_server, tiny_model, tmp_path: Path
):
    gate = tmp_path / "gate"
    server = start_server(
        tiny_model, "--num-workers", "1", *ENGINE_OPTIONS,
        "--worker-command", f"{sys.executable} -P -m tests.kit.workers.gated_worker {gate}",
    )  # fmt: skip
    server.wait_until_ready()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with WeightsClient(server.url, device="cpu") as client:
        assert client.update(model, policy="keep")["outside"] == []
        server.post("/workers/scale", {"num_workers": 2})
        wait_until(lambda: len(versions(server)) == 2, 20, lambda: server.log)
        # The newcomer loads until the gate opens.
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert client.update(model, policy="keep")["version"] == 2
        gate.touch()
        wait_until(lambda: versions(server)[1][0] == "waiting_for_weights", 90, lambda: server.log)
        answer = client.update(model, policy="keep")
        assert (answer["version"], answer["outside"]) == (3, ["1"])
        # The next group has it.
        assert client.update(model, policy="keep")["outside"] == []
        wait_until(lambda: versions(server) == [("ready", 4), ("ready", 4)], 10)
        found = logprobs(server).reshape(4, len(PROMPTS), -1)
        assert np.abs(found - found[0]).max() < 1e-5
        # A worker that leaves breaks the group; the client forms a new one.
        server.post("/workers/scale", {"num_workers": 1})
        wait_until(lambda: versions(server) == [("ready", 4)], 30, lambda: server.log)
        assert client.update(model, policy="keep")["version"] == 5
        assert np.abs(logprobs(server).reshape(4, len(PROMPTS), -1) - found).max() < 1e-5
