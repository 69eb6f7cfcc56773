"""verifiers 0.4.0's training client with renderers 0.1.12, over /inference/v1/generate.

Rollouts with tools need a model that calls them: they are in tests/engine/chat/test_tools.py.
"""

import pytest

from harness.servers import Server
from tests.clients.published import run_client
from tests.clients.scripts import ROLLOUT
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE


def assert_reference(folder: str, turn: dict) -> None:
    ids = turn["completion_ids"]
    rows = reference.logprobs(folder, turn["prompt_ids"], ids)
    expected = rows[range(len(ids)), ids].tolist()
    assert turn["logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def test_turns_of_text(single_server: Server, tiny_model: str):
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8, "cache_salt": "3", "seed": 5}
    script = f"answer(asyncio.run(rollouts(3, {sampling}, 2)))"
    played = run_client("verifiers", single_server.url, ROLLOUT + script, tiny_model)
    for turns in played:
        assert [turn["finish_reason"] in ("stop", "length") for turn in turns] == [True] * 2
        for turn in turns:
            assert_reference(tiny_model, turn)


def test_a_prompt_that_is_too_long_is_not_sent(single_server: Server, tiny_model: str):
    script = """
try:
    asyncio.run(rollouts(1, {"max_tokens": 4}, 1, "word " * 2000))
except Exception as error:
    answer([type(error).__name__, error.status_code, str(error)])
"""
    name, status, text = run_client("verifiers", single_server.url, ROLLOUT + script, tiny_model)
    assert (name, status) == ("ProviderError", 400)
    assert "exceeds maximum context length (1024)" in text
