"""verifiers 0.4.0's training client with renderers 0.1.12, over /inference/v1/generate.

Rollouts with tools need a model that calls them: they are in tests/test_tools.py.
"""

import pytest

from tests import reference
from tests.servers import Server
from tests.test_generate import TOLERANCE
from tests.trainers.published import run_client

ROLLOUT = """
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import SamplingConfig
import renderers

async def rollout(client, model, sampling, turns, question, tools):
    # What verifiers' interception server does with each request of an agent.
    dialect = ChatDialect()
    trace = Trace(task=TraceTask(type="T", data=TaskData()), agent=AgentInfo(config=AgentConfig()))
    messages, found = [{"role": "user", "content": question}], []
    for index in range(turns):
        body = {"model": model, "messages": messages, "tools": tools}
        asked = dialect.parse_request(body)
        turn = prepare_turn(trace, asked.messages, asked.tools)
        response = await client.get_response(
            dialect, body, SamplingConfig(**sampling), session_id=trace.id, turn=turn
        )
        turn.commit(response)
        (choice,) = response.raw["choices"]
        tokens = response.tokens
        found.append({
            "prompt_ids": tokens.prompt_ids, "completion_ids": tokens.completion_ids,
            "logprobs": tokens.completion_logprobs, "bridged": tokens.bridged,
            "message": choice["message"], "finish_reason": choice["finish_reason"],
        })
        messages.append(choice["message"])
        calls = choice["message"].get("tool_calls") or []
        messages += [
            {"role": "tool", "tool_call_id": one["id"], "content": f"Seen {index}"} for one in calls
        ] or [{"role": "user", "content": f"Go on {index}"}]
    return found

async def rollouts(num, sampling, turns, question="Hello", tools=None, renderer="Default"):
    client = TrainClient(TrainClientConfig(
        base_url=url + "/v1", api_key_var="NO_KEY", renderer_model_name=sys.argv[2],
        renderer=getattr(renderers, renderer + "RendererConfig")(),
    ))
    try:
        model = (await client.client.models.list()).data[0].id
        return await asyncio.gather(
            *(rollout(client, model, sampling, turns, question, tools) for _ in range(num))
        )
    finally:
        await client.close()
"""


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
