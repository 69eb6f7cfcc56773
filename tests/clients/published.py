"""Runs published trainers' clients, unmodified, against a server; each in a process of its own.

`make tools` installs each package in a folder of its own, without its dependencies.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.kit.forks import Forks

CLIENTS_FOLDER = Path(os.environ.get("CLIENTS_FOLDER", Path(sys.prefix) / "clients"))
# Whether the clients call vLLM's own server in place of titopool's.
AGAINST_VLLM = os.environ.get("TRAINERS_AGAINST") == "vllm"
# What a script imports, by the package's folder.
MODULES = {
    # With what its first request imports, for seconds.
    "verifiers": (
        "verifiers.v1.clients.train", "httpcore", "transformers.generation",
        "transformers.models.auto.tokenization_auto", "renderers.default", "renderers.gpt_oss",
    ),
    "skyrl": ("skyrl.backends.skyrl_train.inference_servers.remote_inference_client",),
    "areal": ("areal.engine.vllm_remote", "areal.engine.sglang_remote"),
    "rllm": ("rllm_model_gateway.client",),
    "vllm-0.31.0": ("vllm.entrypoints.scale_out.token_in_token_out.protocol",),
}  # fmt: skip
PREAMBLE = """
import asyncio, json, sys

url = sys.argv[1]
answer = lambda result: print(json.dumps(result))
"""


@functools.cache
def forks(package: str) -> Forks:
    """Processes that have imported the package's client."""
    folder = CLIENTS_FOLDER / package
    assert folder.is_dir(), f"no {folder}; `make tools` puts it there"
    return Forks(
        "tests.clients.stand_ins", *MODULES[package], PYTHONPATH=str(folder), HF_HUB_OFFLINE="1"
    )


def run_client(package: str, url: str, script: str, *arguments: str) -> Any:
    """The value that `script` passes to `answer(…)`; it has `url` and `sys.argv[2:]`."""
    printed = forks(package).run(PREAMBLE + script, url, *arguments)
    return json.loads(printed.splitlines()[-1])
