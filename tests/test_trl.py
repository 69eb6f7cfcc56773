"""TRL's published clients against this server, unchanged.

The packages are installed without dependencies beside the test environment (`make test`
does it), one folder for each version.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server, environment

TRL_FOLDER = Path(os.environ.get("TRL_FOLDER", Path(sys.prefix) / "trl"))

SCRIPT = """
import json, sys
from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1], connection_timeout=20)
prompts = [[42, 1393, 14], [5, 6]]
print(json.dumps({
    "text": client.generate(["Hello, AI!", "Tell me a joke"]),
    "ids": client.generate(prompts, temperature=0.0, max_tokens=8),
    "n": client.generate(prompts, n=3, max_tokens=4),
    "none": client.generate(prompts, logprobs=None, max_tokens=4),
    "five": client.generate(prompts, logprobs=5, max_tokens=4, top_k=0),
    "kwargs": client.generate(
        prompts, max_tokens=4, structured_outputs_regex="[ab]+", generation_kwargs={"seed": 3},
    ),
    **({"cut": client.generate([[1, 2, 3]], truncate_prompt_tokens=2)} if sys.argv[2] == "0.29.1" else {}),
}))
"""


@pytest.mark.parametrize("version", ["0.29.1", "1.9.2"])
def test_trl_client_generates(server: Server, version: str):
    folder = TRL_FOLDER / version
    assert folder.is_dir(), f"trl {version} is not in {folder}; `make install` puts it there"
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url, version],
        env=environment(PYTHONPATH=str(folder), HF_HUB_OFFLINE="1"),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    answers = json.loads(result.stdout.splitlines()[-1])
    assert len(answers["text"]["completion_ids"]) == 2
    assert answers["ids"]["prompt_ids"] == [[42, 1393, 14], [5, 6]]
    for ids, logprobs in zip(
        answers["ids"]["completion_ids"], answers["ids"]["logprobs"], strict=True
    ):
        assert [len(entries) for entries in logprobs] == [1] * len(ids)
    assert len(answers["n"]["completion_ids"]) == 6
    assert answers["none"]["logprobs"] is None
    for entries in answers["five"]["logprobs"][0]:
        assert len(entries) in (5, 6)
    if version == "0.29.1":
        assert answers["cut"]["prompt_ids"] == [[2, 3]]
