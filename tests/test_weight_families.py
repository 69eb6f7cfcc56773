"""Updates of tiny models of many families, there and back: all of the model is new, and exact.

Each family's engine runs in the same process, which this module starts for all of them.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.model_families import make_family
from tests.servers import need_gpus
from tests.there_and_back import there_and_back

# Of an engine's start and five updates.
TIMEOUT_S = 600
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
# One for each way in which vLLM keeps or loads weights; `make matrix` tries all families.
MECHANISMS = (
    "llama", "llama-tied", "gemma3", "glm4", "olmoe", "gpt_oss", "deepseek_v3", "mixtral",
    "glm4_moe", "granite", "minimax_m2", "mimo_v2", "phi4", "smollm3", "falcon_h1",
)  # fmt: skip


@pytest.fixture(scope="module")
def in_child() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that tests of this module share."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        child = psutil.Process(pool.submit(os.getpid).result(TIMEOUT_S))
        try:
            yield lambda do, *args: pool.submit(do, *args).result(TIMEOUT_S)
        finally:
            # The pool would wait for an engine that hangs.
            child.kill()


@pytest.mark.parametrize("family", MECHANISMS)
def test_updates_there_and_back_are_exact(
    family: str, tmp_path: Path, in_child: Callable[..., Any]
):
    need_gpus(2)
    own = make_family(family, tmp_path / "own", 0)
    other = make_family(family, tmp_path / "other", 1)
    in_child(there_and_back, family, own, other)
