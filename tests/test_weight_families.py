"""Updates of tiny models of one family of each mechanism, there and back: all of the model is new, and exact.

Each family's engine runs in the same process, which this module starts for all of them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_families import make_family
from tests.servers import need_gpus
from tests.there_and_back import TIMEOUT_S, one_child, there_and_back

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
# A tied head, packed experts, experts with sinks, and a hybrid with a state.
MECHANISMS = ("llama-tied", "mixtral", "gpt_oss", "falcon_h1")


@pytest.fixture(scope="module")
def in_child() -> Iterator[Callable[..., Any]]:
    with one_child() as call:
        yield call


@pytest.mark.parametrize("family", MECHANISMS)
def test_updates_there_and_back_are_exact(
    family: str, tmp_path: Path, in_child: Callable[..., Any]
):
    need_gpus(2)
    own = make_family(family, tmp_path / "own", 0)
    other = make_family(family, tmp_path / "other", 1)
    in_child(there_and_back, family, own, other)
