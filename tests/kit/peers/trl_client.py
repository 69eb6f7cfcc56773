"""Runs TRL's published client, unmodified, in a separate process for each script.

The packages are installed without dependencies next to the test environment (`make test` does so),
one folder for each version.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.kit.forks import Forks

TRL_FOLDER = Path(os.environ.get("TRL_FOLDER", Path(sys.prefix) / "trl"))
# Also imported: the transformers module of the model that scripts train.
MODULES = ("trl.generation.vllm_client", "transformers.models.qwen3.modeling_qwen3")
PREAMBLE = """
import json, sys
from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1], connection_timeout=20)
answer = lambda result: print(json.dumps(result))
"""


@functools.cache
def forks(version: str) -> Forks:
    """Processes that have imported this version of TRL's client, which takes 8 s."""
    folder = TRL_FOLDER / version
    assert folder.is_dir(), f"trl {version} is not in {folder}; `make tools` puts it there"
    return Forks(*MODULES, PYTHONPATH=str(folder), HF_HUB_OFFLINE="1")


def run_trl(version: str, url: str, script: str, *arguments: str) -> Any:
    """The value that `script` passes to `answer(…)`.

    It has `client`, connected to `url`, and `arguments` in `sys.argv[3:]`.
    """
    printed = forks(version).run(PREAMBLE + script, url, version, *arguments)
    return json.loads(printed.splitlines()[-1])
