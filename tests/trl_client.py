"""Runs TRL's published client, unchanged, in a process of its own.

The packages are installed without dependencies beside the test environment (`make test`
does it), one folder for each version.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.servers import environment

TRL_FOLDER = Path(os.environ.get("TRL_FOLDER", Path(sys.prefix) / "trl"))
PREAMBLE = """
import json, sys
from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1], connection_timeout=20)
answer = lambda result: print(json.dumps(result))
"""


def run_trl(version: str, url: str, script: str) -> Any:
    """What `script` gives to `answer(…)`; it finds a `client` of the server at `url`."""
    folder = TRL_FOLDER / version
    assert folder.is_dir(), f"trl {version} is not in {folder}; `make tools` puts it there"
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, url, version],
        env=environment(PYTHONPATH=str(folder), HF_HUB_OFFLINE="1"),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
