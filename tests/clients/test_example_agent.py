"""The first steps of examples/agent.py, with updates and without.

`tests/all/trainers/test_example_agent.py` has all of them, for three seeds.
"""

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from examples import agent
from examples.agent import running_server

SEED = 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server() as url:
        yield url


@pytest.fixture(scope="module")
def warmed_up() -> tuple[Any, Any]:
    return agent.warmed_up(SEED)


def train(url: str, warmed_up: tuple[Any, Any], **options: Any) -> list[dict[str, float]]:
    model, tokenizer = warmed_up
    return agent.train(url, copy.deepcopy(model), tokenizer, SEED, **options)


def mean_reward(history: list[dict[str, float]]) -> float:
    return sum(one["reward"] for one in history) / len(history)


def test_the_agent_begins_to_learn(url: str, warmed_up: tuple[Any, Any]):
    history = train(url, warmed_up, num_steps=8, withhold_updates=False)
    assert mean_reward(history[-3:]) > 0.5
    for one in history:
        assert one["called"] > 0.9
        # The trainer computes what the server has sampled with: masks and turns are in place.
        assert one["ratio_error"] < 1e-3
    assert all(new["version"] == old["version"] + 1 for old, new in pairwise(history))


def test_without_updates_it_does_not(url: str, warmed_up: tuple[Any, Any]):
    history = train(url, warmed_up, num_steps=3, withhold_updates=True)
    assert mean_reward(history) < 0.4
    assert len({one["version"] for one in history}) == 1
    # The trainer's weights are no longer the server's.
    assert history[-1]["ratio_error"] > 1e-2
