"""The first steps of examples/openai_agents.py, whose trainer is that of examples/agent.py.

The part `variants` has the first steps of the latter, with updates and without, and
`tests/all/trainers/test_example_agent.py` has all steps of both.
"""

import asyncio
import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from examples import agent
from examples.agent import running_server
from tests.kit.trainers.agents_sdk import sdk_example

SEED = 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server() as url:
        yield url


@pytest.fixture(scope="module")
def of_sdk() -> Iterator[Any]:
    """examples/openai_agents.py with steps of 16 agents."""
    with sdk_example() as example, pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "PROMPTS_PER_STEP", 2)
        yield example


@pytest.fixture(scope="module")
def sdk_url(of_sdk: Any, warmed_up: tuple[Any, Any]) -> Iterator[str]:
    with of_sdk.running_server() as url:
        yield url


@pytest.fixture(scope="module")
def warmed_up() -> tuple[Any, Any]:
    return agent.warmed_up(SEED)


def train(url: str, warmed_up: tuple[Any, Any], **options: Any) -> list[dict[str, float]]:
    model, tokenizer = warmed_up
    return agent.train(url, copy.deepcopy(model), tokenizer, SEED, **options)


def mean_reward(history: list[dict[str, float]]) -> float:
    return sum(one["reward"] for one in history) / len(history)


@pytest.mark.variant
def test_the_agent_begins_to_learn(url: str, warmed_up: tuple[Any, Any]):
    history = train(url, warmed_up, num_steps=8, withhold_updates=False)
    assert mean_reward(history[-3:]) > 0.5
    for one in history:
        assert one["called"] > 0.9
        # The trainer computes what the server has sampled with: masks and turns are in place.
        assert one["ratio_error"] < 1e-3
    assert all(new["version"] == old["version"] + 1 for old, new in pairwise(history))


@pytest.mark.variant
def test_without_updates_it_does_not(url: str, warmed_up: tuple[Any, Any]):
    history = train(url, warmed_up, num_steps=3, withhold_updates=True)
    assert mean_reward(history) < 0.4
    assert len({one["version"] for one in history}) == 1
    # The trainer's weights are no longer the server's.
    assert history[-1]["ratio_error"] > 1e-2


def test_agents_of_an_unchanged_package_take_steps(
    of_sdk: Any, sdk_url: str, warmed_up: tuple[Any, Any]
):
    history = train(sdk_url, warmed_up, num_steps=2, withhold_updates=False, play=of_sdk.play)
    for one in history:
        # Of 64 agents; some write a call that cannot be read.
        assert one["called"] > 0.75
        assert one["ratio_error"] < 1e-3
        assert one["ours"] == 0
        assert one["retokenized"] < 0.1 * one["tokens"] < one["without_thoughts"]
    assert [one["version"] - history[0]["version"] for one in history] == [0, 1]


def test_agents_that_fail_count_for_the_loss(
    of_sdk: Any, sdk_url: str, warmed_up: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    renamed = functools.partial(of_sdk.function_tool, name_override="other")
    monkeypatch.setattr(of_sdk, "function_tool", renamed)
    played = of_sdk.play(sdk_url, warmed_up[1], seed=0)
    num_agents = of_sdk.PROMPTS_PER_STEP * agent.GROUP_SIZE
    assert played.measured["failed"] > 0.75 * num_agents
    assert not played.rewards.any()
    assert played.agents == list(range(num_agents))
    assert all(one.loss_mask.any() for one in played.sequences)
    assert played.measured["ours"] == 0


def test_the_counts_find_other_ids(of_sdk: Any, sdk_url: str):
    runs, answered = asyncio.run(of_sdk.run_step(sdk_url, 0))
    (run, (first, second)) = next(
        (run, one) for run, one in zip(runs, answered, strict=True) if len(one) == 2
    )
    (sample,) = run.samples
    ids = sample.ids.tolist()
    assert (of_sdk.num_wrong([sample], [first, second]), of_sdk.num_changed(sample, ids)) == (0, 0)

    def changed(place: int) -> Any:
        other = np.where(np.arange(len(ids)) == place, sample.ids + 1, sample.ids)
        return replace(sample, ids=other)

    last = changed(-1 % len(ids))
    assert of_sdk.num_wrong([last], [first, second]) == 1
    # What follows was sampled after something else.
    early = changed(sample.prompt_length)
    assert of_sdk.num_wrong([early], [first, second]) == 1 + len(second.ids)
    assert of_sdk.num_changed(early, ids) == of_sdk.num_changed(last, ids) == 1
    masked = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    assert of_sdk.num_wrong([masked], [first, second]) == len(first.ids) + len(second.ids)
