"""Scripts that run published trainers' clients."""

PROMPT = [42, 1393, 14]

# The part of the engine that sends requests; `initialize` would also start a thread for workflows.
ENGINE = (
    f"PROMPT = {PROMPT}"
    + """
import logging, types
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest
from areal.infra import workflow_context
from areal.infra.remote_inf_engine import RemoteInfEngine

def engine_of(backend):
    engine = RemoteInfEngine(InferenceEngineConfig(request_retries=1), backend)
    engine.addresses = [url.removeprefix("http://")]
    engine.logger = logging.getLogger("areal")
    engine._workflow_executor = types.SimpleNamespace(is_paused=lambda: False)
    engine._wait_for_server(engine.addresses[0])
    return engine

async def generated(engine, **options):
    requests = [
        ModelRequest(input_ids=PROMPT, gconfig=GenerationHyperparameters(**options)) for _ in range(3)
    ]
    keys = ("input_tokens", "output_tokens", "output_logprobs", "stop_reason")
    try:
        found = await asyncio.gather(*map(engine.agenerate, requests))
        return [{key: getattr(one, key) for key in keys} for one in found]
    finally:
        await (await workflow_context.get_aiohttp_session()).close()
"""
)

CLIENT = """
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)

async def call():
    import requests

    model = requests.get(url + "/v1/models", timeout=20).json()["data"][0]["id"]
    async with RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=model
    ) as client:
        return await calls(client)

answer(asyncio.run(call()))
"""

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
