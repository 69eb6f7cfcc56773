"""vLLM's own server for the comparisons of this folder: it starts once, and ends with the last."""

from collections.abc import Iterator

import pytest

from tests.vllm_serve import Greedy, vllm_server


@pytest.fixture(scope="package")
def theirs(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    with vllm_server(tiny_model, tmp_path_factory.mktemp("vllm-serve") / "log") as url:
        yield url


@pytest.fixture(scope="package")
def said(theirs: str) -> Greedy:
    """What the model says there."""
    return Greedy(theirs)
