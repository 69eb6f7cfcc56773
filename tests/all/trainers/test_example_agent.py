"""examples/agent.py learns with three seeds, and examples/openai_agents.py with one; both learn nothing
when updates are withheld.

`tests/clients/test_example_agent.py` has their first steps.
"""

from pathlib import Path
from typing import Any

import pytest

from examples import agent
from tests.kit.trainers.agents_sdk import sdk_example

# Starts a server: tests/conftest.py groups and marks the module by this name.
running_server = agent.running_server
# The bound for three seeds on two cores is 15 minutes.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def learned() -> list[list[dict[str, Any]]]:
    return list(agent.main(["--seed", "0", "1", "2"]).values())


def test_three_seeds_learn(learned: list[list[dict[str, Any]]]):
    for history in learned:
        rewards = [one["reward"] for one in history]
        assert rewards[0] < 0.4
        assert sum(rewards[-5:]) / 5 >= agent.LEARNED, rewards


def test_without_updates_nothing_is_learned(learned: list[list[dict[str, Any]]]):
    num_steps = max(map(len, learned))
    (withheld,) = agent.main(
        ["--seed", "0", "--withhold-updates", "--steps", str(num_steps)]
    ).values()
    rewards = [one["reward"] for one in withheld]
    assert len({one["version"] for one in withheld}) == 1
    assert sum(rewards[-5:]) / 5 < 0.4, rewards


def test_agents_of_an_unchanged_package_learn(tmp_path: Path):
    out = tmp_path / "agents.png"
    with sdk_example() as example:
        learned, withheld = example.main(["--control", "--out", str(out)]).values()
    for history in (learned, withheld):
        assert history[0]["reward"] < 0.4
        assert sum(one["ours"] for one in history) == 0
    assert sum(one["retokenized"] for one in learned) > 0
    assert max(one["ratio_error"] for one in learned) < 1e-3
    assert sum(one["reward"] for one in learned[-5:]) / 5 >= agent.LEARNED
    assert sum(one["reward"] for one in withheld[-5:]) / 5 < 0.4
    assert len({one["version"] for one in withheld}) == 1
    assert out.stat().st_size > 0
