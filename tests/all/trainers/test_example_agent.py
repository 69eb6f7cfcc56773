"""examples/agent.py learns with three seeds, and learns nothing when updates are withheld.

`tests/clients/test_example_agent.py` has its first steps.
"""

from typing import Any

import pytest

from examples import agent

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
