"""TRL's published clients, unmodified, against this server."""

import pytest

from harness.servers import Server
from tests.kit.peers.trl_client import run_trl

SCRIPT = """
prompts = [[42, 1393, 14], [5, 6]]
answer({
    "text": client.generate(["Hello, AI!", "Tell me a joke"]),
    "ids": client.generate(prompts, temperature=0.0, max_tokens=8),
    "n": client.generate(prompts, n=3, max_tokens=4),
    "none": client.generate(prompts, logprobs=None, max_tokens=4),
    "five": client.generate(prompts, logprobs=5, max_tokens=4, top_k=0),
    "kwargs": client.generate(
        prompts, max_tokens=4, structured_outputs_regex="[ab]+", generation_kwargs={"seed": 3},
    ),
    **({"cut": client.generate([[1, 2, 3]], truncate_prompt_tokens=2)} if sys.argv[2] == "0.29.1" else {}),
})
"""


@pytest.mark.parametrize("version", [pytest.param("0.29.1", marks=pytest.mark.variant), "1.9.2"])
def test_trl_client_generates(server: Server, version: str):
    answers = run_trl(version, server.url, SCRIPT)
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
