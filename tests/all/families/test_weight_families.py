"""Updates of tiny models of further families, there and back: all of the model is new, and exact.

Each family's engine runs in the same process, which this module starts for all of them.
"""

import pytest

from tests.kit.workers.there_and_back import TIMEOUT_S, check_family, in_child  # noqa: F401

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
# One for each further way in which vLLM keeps or loads weights; `make matrix` tries all families.
FAMILIES = (
    "llama", "gemma3", "glm4", "olmoe", "deepseek_v3", "glm4_moe", "granite", "minimax_m2", "mimo_v2",
    "phi4", "smollm3",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_there_and_back_are_exact(family, tmp_path, in_child):  # noqa: F811
    check_family(family, tmp_path, in_child)
