"""examples/grpo.py learns through a real server, and learns nothing when updates are withheld.

All runs share the server that the example starts itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from examples import grpo
from harness.servers import wait_until

# Starts a server: tests/conftest.py groups and marks the module by this name.
running_server = grpo.running_server
# Others than those that chose the learning rate.
SEEDS = ("3", "4", "5")
# All runs take 100 s on two cores that do nothing else.
pytestmark = pytest.mark.timeout(900)

History = list[dict[str, Any]]


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo") / "grpo.png"


class Runs(NamedTuple):
    # By label; the last run has its updates withheld.
    histories: dict[str, History]
    # Of a few steps with --sync.
    sync: History


@pytest.fixture(scope="module")
def runs(picture: Path) -> Runs:
    """Each run's measurements."""
    synced: dict[str, History] = {}

    @contextmanager
    def with_sync_run() -> Iterator[str]:
        with running_server() as url:
            yield url
            sync = ["--url", url, "--sync", "--steps", "4", "--seeds", "6"]
            synced.update(grpo.main([*sync, "--out", str(picture.with_name("sync.png"))]))

    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "running_server", with_sync_run)
        found = grpo.main(["--seeds", *SEEDS, "--control", "--out", str(picture)])
    wait_until(lambda: set(psutil.Process().children(recursive=True)) <= before, 10)
    (sync,) = synced.values()
    return Runs(found, sync)


@pytest.fixture(scope="module")
def histories(runs: Runs) -> dict[str, History]:
    return runs.histories


@pytest.fixture(scope="module")
def learned(histories: dict[str, History]) -> list[History]:
    return list(histories.values())[: len(SEEDS)]


def test_three_seeds_learn_prompts_that_they_were_not_trained_on(learned: list[History]):
    for history in learned:
        rewards = [one["reward"] for one in history]
        assert rewards[0] < 0.2
        assert sum(rewards[-5:]) / 5 > 0.9, rewards


def test_without_updates_nothing_is_learned(histories: dict[str, History], learned: list[History]):
    withheld = list(histories.values())[-1]
    assert len(withheld) >= max(map(len, learned))
    assert max(one["reward"] for one in withheld) < 0.3
    assert withheld[-1]["version"] - withheld[-1]["held_version"] == len(withheld) - 1


def test_weights_reach_the_server_at_each_step(learned: list[History]):
    """By the version in the answers."""
    for history in learned:
        assert all(one["held_version"] == one["version"] for one in history)
        assert all(new["version"] == old["version"] + 1 for old, new in pairwise(history))


def test_tokens_of_the_trainers_weights_have_ratio_1(learned: list[History]):
    for history in learned:
        assert all(one["num_new"] > 0 for one in history)
        assert max(one["new_ratio_error"] for one in history) < 1e-3
        # Tokens of older weights differ, so the figure above can fail.
        assert max(abs(one["ratio_high"] - 1) for one in history) > 0.05


def test_rollouts_are_in_flight_while_weights_change(learned: list[History]):
    for history in learned:
        assert max(one["max_staleness"] for one in history) == 1
    # Completions with tokens of two versions.
    assert sum(one["mixed"] for history in learned for one in history) > 0


def test_with_sync_no_rollout_is_in_flight_while_weights_change(runs: Runs):
    assert len(runs.sync) == 4
    for one in runs.sync:
        assert (one["max_staleness"], one["mixed"]) == (0, 0)
        # All tokens are of the trainer's weights.
        assert one["new_ratio_error"] < 1e-3
        assert one["ratio_low"] == pytest.approx(1, abs=1e-3)
    assert all(new["version"] == old["version"] + 1 for old, new in pairwise(runs.sync))


def test_the_picture_is_written(histories: dict[str, History], picture: Path):
    assert picture.read_bytes().startswith(b"\x89PNG")
