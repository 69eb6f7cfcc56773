"""The same answer of /inference/v1/generate, read by vLLM's models of two versions of its wire."""

import json

import pytest

from harness.servers import Server
from tests.clients.published import run_client
from tests.kit.peers.vllm_protocol import GENERATE, read_by_vllm

BODY = {
    "token_ids": [42, 1393, 14], "return_token_ids": True,
    "sampling_params": {"n": 2, "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1},
}  # fmt: skip
OLD = "vllm-0.31.0"


@pytest.mark.variant
def test_the_models_of_0_31_and_0_32_read_the_same_bytes(single_server: Server, tmp_path):
    answer = single_server.post(GENERATE, BODY)
    assert answer.status_code == 200, answer.text
    script = """
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse
from importlib.metadata import version

answer([
    [one.token_ids, [(entry.token, entry.logprob) for entry in one.logprobs.content]]
    for one in GenerateResponse.model_validate_json(open(sys.argv[2], "rb").read()).choices
])
"""
    (tmp_path / "answer").write_bytes(answer.content)
    old = run_client(OLD, single_server.url, script, str(tmp_path / "answer"))
    new = read_by_vllm("GenerateResponse", answer.content)
    assert len(old) == len(new.choices) == 2
    for (ids, content), choice in zip(old, new.choices, strict=True):
        assert ids == choice.token_ids
        entries = choice.logprobs.content
        assert [[f"token_id:{one.token_id}", one.logprob] for one in entries] == content
        assert [one.token_id for one in entries] == ids
    assert json.loads(answer.content)["prompt_token_ids"] == BODY["token_ids"]
