"""`TRAINERS_AGAINST=vllm`: vLLM's own server in the place of titopool's, for tests of clients.

So a client's test says what works with both. Tests of what only titopool has fail.
"""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from tests.kit.peers.vllm_serve import vllm_server


@pytest.fixture(scope="session")
def single_server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's server with the routes that these clients call switched on."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    log = tmp_path_factory.mktemp("vllm-serve") / "log"
    options = {
        "max_model_len": 1024, "enable_scale_out": True, "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes", "weight_transfer_config": '{"backend": "nccl"}',
    }  # fmt: skip
    with vllm_server(tiny_model, log, **options) as url:
        yield instead(url)


@pytest.fixture(scope="session")
def server(single_server: Any) -> Any:
    """The same one: vLLM's server has one engine."""
    return single_server


def instead(url: str) -> Any:
    """What tests of clients use of `harness.servers.Server`."""
    post = lambda path, json: requests.post(url + path, json=json, timeout=120)  # noqa: E731
    return SimpleNamespace(url=url, post=post)
