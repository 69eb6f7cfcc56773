"""TRL's GRPOTrainer learns through a real server: words with both of its wires, and images.

Everything is TRL's own but NCCL, which needs GPUs: gloo stands in for it on CPUs.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.servers import REPOSITORY, Server, environment, need_gpus, running_server
from tests.kit.peers.trl_client import TRL_FOLDER
from titopool.settings.gpus import visible_gpus

# Of one training; on two cores 40 steps of words take 25 s.
TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@contextmanager
def server_of(task: str, length: int, folder: Path) -> Iterator[tuple[Server, str]]:
    """A server of the example's model, which it writes itself, and the model's folder."""
    need_gpus(2)
    model = str(folder / task)
    words = [sys.executable, f"examples/{task}.py", "--make-model", model]
    subprocess.run(words, check=True, capture_output=True, cwd=REPOSITORY, env=environment())
    options = ("--dtype", "float32", "--max-model-len", str(length), "--max-num-seqs", "512")
    with running_server(model, *options, log=folder / "log") as server:
        yield server, model


def train(
    server: Server, task: str, model: str, version: str, num_steps: int, *goal: float
) -> list[Any]:
    """What each step of the training measured; with a goal, it ends once that is reached."""
    gpu = visible_gpus()[1:2]
    environ = environment(
        PYTHONPATH=str(TRL_FOLDER / version), HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
        **({"CUDA_VISIBLE_DEVICES": gpu[0]} if gpu else {}),
    )  # fmt: skip
    words = [
        sys.executable,
        "-m",
        "tests.kit.trainers.trl_trainer",
        task,
        model,
        server.url,
        str(num_steps),
    ]
    words += map(str, goal)
    done = subprocess.run(
        words, env=environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"reward"')]
    assert len(steps) == num_steps or goal
    return steps


def weight_version(server: Server) -> int:
    return int(server.generate([[1]], max_tokens=1)["weight_versions"][0][-1][0])


def mean_reward(steps: list[Any]) -> float:
    return float(sum(step["reward"] for step in steps) / len(steps))


@pytest.fixture(scope="module")
def words_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    with server_of("trl_grpo", 64, tmp_path_factory.mktemp("words")) as found:
        yield found


@pytest.mark.parametrize("version", ["1.9.2", "1.16.0"])
def test_a_trainer_learns_words(words_server: tuple[Server, str], version: str):
    server, model = words_server
    before = weight_version(server)
    steps = train(server, "trl_grpo", model, version, 40)
    # TRL sends its weights before each batch.
    assert weight_version(server) == before + 40
    assert steps[0]["reward"] < 0.1
    # The best constant answer scores 1/8.
    assert mean_reward(steps[-5:]) > 0.6, steps
    if not visible_gpus():
        # In float32: TRL's own comparison of the server's log-probabilities with its model's.
        assert max(step["logprob_difference"] for step in steps) < 1e-4


def test_a_trainer_learns_colours_of_images(tmp_path: Path):
    # Ten steps reach it as a rule, but nothing seeds what the server samples. One answer to all
    # images would have so much in three of 30 steps once in 20,000 trainings.
    goal = 0.4
    with server_of("trl_grpo_images", 256, tmp_path) as (server, model):
        steps = train(server, "trl_grpo_images", model, "1.16.0", 30, goal)
    assert steps[0]["reward"] < 0.2
    assert mean_reward(steps[-3:]) > goal, steps
