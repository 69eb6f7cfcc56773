"""Updates of one tiny model of each mechanism, there and back: all of it is new, and exact.

Each family's engine runs in the same process, which this module starts for all of them.
"""

import pytest

from tests.kit.workers.there_and_back import TIMEOUT_S, check_family, in_child  # noqa: F401

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
# A tied head, packed experts, experts with sinks, and a hybrid with a state.
MECHANISMS = (
    "llama-tied", "mixtral", pytest.param("gpt_oss", marks=pytest.mark.variant), "falcon_h1",
)  # fmt: skip


@pytest.mark.parametrize("family", MECHANISMS)
def test_updates_there_and_back_are_exact(family, tmp_path, in_child):  # noqa: F811
    check_family(family, tmp_path, in_child)
