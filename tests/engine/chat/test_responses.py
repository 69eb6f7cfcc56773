"""The Responses API with the unmodified openai package and openai-agents, over real vLLM."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from harness.api_schemas import check_answer, operation_of
from harness.servers import Server
from tests.kit.models.scripted_model import TALK, THOUGHT
from tests.kit.peers.openai_calls import HELLO, client_of
from tests.kit.peers.scripted_server import Scripted
from tests.kit.peers.verifiers_rollouts import VERIFIERS_FOLDER

PATH = "/v1/responses"
IDS = {"return_token_ids": True}
QUESTION = "What is tito?"
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
LOOK_UP = {"type": "function", "name": "look_up", "description": "a book", "parameters": SCHEMA}
IN_CHAT = {"type": "function", "function": {key: LOOK_UP[key] for key in LOOK_UP if key != "type"}}
ARGUMENTS = {"word": "tito"}
LOGPROBS = "message.output_text.logprobs"


def respond(scripted: Scripted, **fields: Any) -> Any:
    options = {"model": scripted.model, "temperature": 0, "input": QUESTION, "tools": [LOOK_UP]}
    return scripted.client.responses.create(**options | {"extra_body": IDS} | fields)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def checked(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a body, or the last response of its stream; it fits the description."""
    answer = server.post(PATH, body)
    assert answer.ok, answer.text
    check_answer(operation_of("post", PATH), answer)
    if not body.get("stream"):
        found: dict[str, Any] = answer.json()
    else:
        found = json.loads(answer.text.rpartition("data: ")[2])["response"]
    Response.model_validate(found)
    return found


def without(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    """What two answers to one body have in common."""
    text = json.dumps({key: one for key, one in answer.items() if key not in names})
    return json.loads(text.replace(answer["id"].removeprefix("resp_"), "ID"))


# ---- texts ---------------------------------------------------------------------------------


def test_a_text_has_the_ids_of_the_same_chat(client, server: Server, model):
    chat = client.chat.completions.create(
        model=model, messages=HELLO, temperature=0, max_tokens=8, extra_body=IDS
    )
    (choice,) = chat.choices
    fields = {"model": model, "temperature": 0, "max_output_tokens": 8, "extra_body": IDS}
    parts = [{"type": "input_text", "text": HELLO[1]["content"]}]
    for given in (
        {"instructions": "Be brief.", "input": HELLO[1]["content"]},
        {"input": HELLO},
        {
            "instructions": "Be brief.",
            "input": [{"type": "message", "role": "user", "content": parts}],
        },
    ):
        answer = client.responses.create(**fields, **given)
        assert answer.prompt_token_ids == chat.prompt_token_ids
        assert answer.token_ids == choice.token_ids
        assert answer.output_text == choice.message.content
        assert answer.usage.input_tokens == len(answer.prompt_token_ids)
        assert answer.usage.output_tokens == 8
        assert (answer.status, answer.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert answer.output[0].status == "incomplete"


@pytest.mark.parametrize("more", [{}, {"include": [LOGPROBS], "top_logprobs": 2}])
def test_a_stream_joins_to_the_whole_answer(client, server: Server, model, more):
    body = {
        "model": model,
        "input": HELLO,
        "temperature": 0,
        "max_output_tokens": 12,
        **IDS,
        **more,
    }
    whole = checked(server, body)
    last = checked(server, body | {"stream": True})
    names = ("created_at", "usage")
    assert without(last, *names) == without(whole, *names)
    with client.responses.stream(
        model=model, input=HELLO, temperature=0, max_output_tokens=12, extra_body=IDS | more
    ) as stream:
        events = list(stream)
    assert [one.sequence_number for one in events] == list(range(len(events)))
    deltas = [one for one in events if one.type == "response.output_text.delta"]
    (part,) = whole["output"][0]["content"]
    assert "".join(one.delta for one in deltas) == part["text"]
    assert deltas[-1].snapshot == part["text"]
    found = [token.to_dict() for one in deltas for token in one.logprobs]
    # Tokens after the last one with a text have no delta.
    assert found == part["logprobs"][: len(found)]
    assert [one.type for one in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert [one.type for one in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip


def test_logprobs_are_those_of_the_same_chat(client, model):
    chat = client.chat.completions.create(
        model=model, messages=HELLO, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    answer = client.responses.create(
        model=model, input=HELLO, temperature=0, max_output_tokens=6, include=[LOGPROBS],
        top_logprobs=2,
    )  # fmt: skip
    found = [one.to_dict() for one in answer.output[0].content[0].logprobs]
    for one, expected in zip(found, chat.choices[0].logprobs.content, strict=True):
        assert one["token"] == expected.token
        assert one["logprob"] == pytest.approx(expected.logprob, abs=1e-4)
        assert [other["token"] for other in one["top_logprobs"]] == [
            other.token for other in expected.top_logprobs
        ]


def test_a_format_guides_the_text(client, model):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    answer = client.responses.create(
        model=model, input=HELLO, temperature=0, max_output_tokens=60, text={"format": form}
    )
    assert answer.output_text.lstrip().startswith("{")
    assert answer.text.format.to_dict() == form
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text)["a"], bool)


def test_an_input_that_is_too_long_has_openais_code(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input="word " * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    assert caught.value.message.count("messages") == 0


def test_an_unknown_field_is_accepted_and_counted(client, server: Server, model):
    def counted() -> float:
        text = server.get("/metrics").text
        found = re.search(rf'^titopool_unknown_fields_total{{route="{PATH}"}} (\S+)$', text, re.M)
        return float(found[1]) if found else 0

    before = counted()
    part = {"type": "input_text", "text": "a", "cache_hint": 1}
    item = {"role": "user", "content": [part], "phase": "x", "id": "msg_1", "status": "completed"}
    client.responses.create(
        model=model, input=[item], max_output_tokens=1, extra_body={"new_field": {"a": 1}}
    )
    assert counted() == before + 1


def test_fields_without_effect_are_accepted_and_some_repeated(client, model):
    answer = client.responses.create(
        model=model, input="a", max_output_tokens=2, store=True, metadata={"a": "b"}, user="me",
        service_tier="auto", prompt_cache_key="a-session", safety_identifier="x",
        include=["reasoning.encrypted_content"], truncation="disabled", max_tool_calls=3,
        reasoning={"effort": "low", "summary": "auto"}, extra_body={"top_k": 1, "seed": 3},
    )  # fmt: skip
    assert answer.metadata == {"a": "b"}
    assert answer.store is False
    assert answer.reasoning.effort == "low"


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "schema": {"a": 10**30}}}}, "text.format"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"messages": HELLO}}, "messages: expected no value"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "text.format"),
        ({"extra_body": {"max_tokens": 5}}, "max_output_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        *(
            ({"tools": [{"type": kind}]}, "tools[0]: expected a tool of type function")
            for kind in (
                "web_search", "file_search", "code_interpreter", "mcp", "computer_use_preview",
                "custom", "image_generation", "local_shell", "shell", "apply_patch", "namespace",
            )
        ),
        *(
            ({"input": [{"type": kind}]}, "input[0]: expected an item of type")
            for kind in ("item_reference", "web_search_call", "compaction", "computer_call")
        ),
        *(
            ({"input": [{"role": "user", "content": [part]}]}, "input[0].content[0]")
            for part in (
                {"type": "input_file", "file_id": "a"}, {"type": "input_audio", "data": ""},
                {"type": "input_image", "file_id": "a"},
                {"type": "input_image", "image_url": "https://example.com/a.png"},
                {"type": "input_text"},
            )
        ),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ({"input": []}, "input: expected at least one message"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(client, model, fields, part):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": model, "input": "a"} | fields)
    assert part in caught.value.message
    assert caught.value.param


# ---- tools and reasoning -------------------------------------------------------------------


def check_output(output: list[Any]) -> None:
    reasoning, message, call = output
    assert [one.type for one in output] == ["reasoning", "message", "function_call"]
    assert reasoning.content[0].text.strip() == THOUGHT
    assert message.content[0].text.strip() == TALK.strip()
    assert call.name == "look_up"
    assert json.loads(call.arguments) == ARGUMENTS
    assert {one.status for one in output} == {"completed"}


def test_reasoning_text_and_a_call_are_items(scripted: Scripted):
    answer = respond(scripted)
    check_output(answer.output)
    assert answer.status == "completed"
    assert answer.token_ids == scripted.ids
    assert len(answer.token_logprobs) == len(scripted.ids)
    assert answer.tools[0].name == "look_up"


def test_streamed_items_are_those_of_the_whole_answer(scripted: Scripted):
    body = {"input": QUESTION, "tools": [LOOK_UP], "temperature": 0, "include": [LOGPROBS], **IDS}
    whole, last = (checked(scripted.server, body | {"stream": one}) for one in (False, True))
    whole_calls, last_calls = whole["output"].pop(), last["output"].pop()
    assert last_calls["arguments"] == whole_calls["arguments"]
    assert [one["type"] for one in last["output"]] == ["reasoning", "message"]
    assert last["token_ids"] == whole["token_ids"] == scripted.ids
    for one, other in zip(last["output"], whole["output"], strict=True):
        assert one["content"][0]["text"].strip() == other["content"][0]["text"].strip()
    assert (
        last["output"][1]["content"][0]["logprobs"] == whole["output"][1]["content"][0]["logprobs"]
    )
    with scripted.client.responses.stream(
        model=scripted.model, input=QUESTION, tools=[LOOK_UP], temperature=0
    ) as stream:
        events = list(stream)
        check_output(stream.get_final_response().output)
    assert [one.sequence_number for one in events] == list(range(len(events)))
    done = {one.output_index: one.item for one in events if one.type == "response.output_item.done"}
    check_output([done[index] for index in range(3)])
    kinds = [one.type for one in respond(scripted, stream=True)]
    assert [one.type for one in events] == kinds
    for kind, index in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        own = [one for one in events if one.type.startswith(f"response.{kind}.")]
        assert {(one.output_index, one.item_id) for one in own} == {(index, done[index].id)}
        *deltas, end = own
        text = end.arguments if index == 2 else end.text
        assert "".join(one.delta for one in deltas) == text


def test_a_second_turn_has_the_ids_of_the_same_chat(scripted: Scripted):
    first = respond(scripted)
    call = first.output[2]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "token in"}
    second = respond(scripted, input=[{"role": "user", "content": QUESTION}, *first.output, output])
    check_output(second.output)
    asked = [{"role": "user", "content": QUESTION}]
    body = {"messages": asked, "tools": [IN_CHAT], "temperature": 0, **IDS}
    chat = scripted.server.post("/v1/chat/completions", body).json()
    assert first.prompt_token_ids == chat["prompt_token_ids"]
    message = chat["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "token in"}
    body["messages"] = [*asked, message, result]
    chat = scripted.server.post("/v1/chat/completions", body).json()
    assert second.prompt_token_ids == chat["prompt_token_ids"]
    assert second.token_ids == chat["choices"][0]["token_ids"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look_up"}])
def test_a_call_is_required(scripted: Scripted, choice):
    schema = {**SCHEMA, "properties": {"word": {"type": "boolean"}}, "additionalProperties": False}
    answer = respond(
        scripted,
        tools=[{**LOOK_UP, "parameters": schema, "strict": True}], tool_choice=choice,
        parallel_tool_calls=False, max_output_tokens=200, extra_body={"logit_bias": {"0": 90}},
    )  # fmt: skip
    (call,) = [one for one in answer.output if one.type == "function_call"]
    assert isinstance(json.loads(call.arguments)["word"], bool)


def test_errors_of_tools_name_the_fields_of_the_body(scripted: Scripted):
    for fields, part in (
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{**LOOK_UP, "parameters": {"maximum": 10**20}}]}, "64 bits"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "nobody"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            respond(scripted, **fields)
        assert part in caught.value.message


AGENT = """
import asyncio, json, sys
from openai import AsyncOpenAI
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled

set_tracing_disabled(True)

@function_tool
def look_up(word: str) -> str:
    "a book"
    return f"found {word}"

async def main():
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
    agent = Agent(
        name="reader", instructions="Be brief.", tools=[look_up],
        model=OpenAIResponsesModel(model=sys.argv[2], openai_client=client),
        model_settings=ModelSettings(temperature=0), tool_use_behavior="stop_on_first_tool",
    )
    first = await Runner.run(agent, "What is tito?")
    second = await Runner.run(agent, first.to_input_list() + [{"role": "user", "content": "Go on"}])
    streamed = Runner.run_streamed(agent, "What is tito?")
    kinds = [one.type async for one in streamed.stream_events()]
    print(json.dumps([first.final_output, second.final_output, streamed.final_output, kinds]))

asyncio.run(main())
"""


def test_openai_agents_call_functions(scripted: Scripted):
    assert VERIFIERS_FOLDER.is_dir(), f"no openai-agents in {VERIFIERS_FOLDER}; see `make tools`"
    done = subprocess.run(
        [sys.executable, "-c", AGENT, scripted.server.url, scripted.model],
        env=os.environ | {"PYTHONPATH": str(VERIFIERS_FOLDER)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *outputs, kinds = json.loads(done.stdout.splitlines()[-1])
    assert outputs == ["found tito"] * 3
    assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
