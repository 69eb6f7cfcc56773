"""vLLM's own server for the comparisons in this folder: started once for all tests."""

from collections.abc import Iterator

import pytest

from tests.kit.peers.vllm_serve import Greedy, vllm_server


@pytest.fixture(scope="package")
def vllm_url(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of vLLM's server."""
    with vllm_server(tiny_model, tmp_path_factory.mktemp("vllm-serve") / "log") as url:
        yield url


@pytest.fixture(scope="package")
def greedy(vllm_url: str) -> Greedy:
    """The model's greedy output, sampled by vLLM's server."""
    return Greedy(vllm_url)
