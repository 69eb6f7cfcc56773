"""Anthropic's Messages with the unmodified anthropic package, over real vLLM."""

import json

import anthropic
import pytest

from harness.images import encoded, picture
from harness.servers import Server, front_ends
from tests.kit.models.scripted_model import TALK, THOUGHT
from tests.kit.peers.openai_calls import HELLO, client_of
from tests.kit.peers.scripted_server import ARGUMENTS, LOOK_UP, SCHEMA, Scripted

QUESTION = [{"role": "user", "content": "What is tito?"}]
TOOL = {"name": "look_up", "description": "a dictionary", "input_schema": SCHEMA}
IDS = {"return_token_ids": True}
# The package has no argument for it.
GREEDY = {"temperature": 0}


def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic_client(server)


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return client_of(server).models.list().data[0].id


def test_a_message_has_the_ids_of_the_same_chat(server: Server, client, model):
    system, user = HELLO
    answer = client.messages.create(
        model=model, max_tokens=8, system=[{"type": "text", "text": system["content"]}],
        messages=[user], extra_body=IDS | GREEDY,
    )  # fmt: skip
    chat = client_of(server).chat.completions.create(
        model=model, messages=HELLO, max_tokens=8, temperature=0, logprobs=True,
        extra_body={**IDS, "return_weight_versions": False},
    )  # fmt: skip
    (choice,) = chat.choices
    assert answer.prompt_token_ids == chat.prompt_token_ids
    assert answer.token_ids == choice.token_ids
    assert answer.token_logprobs == pytest.approx(
        [one.logprob for one in choice.logprobs.content], abs=1e-5
    )
    assert answer.weight_versions == [[0, 0]]
    assert [one.text for one in answer.content] == [choice.message.content]
    ends = {"length": "max_tokens", "stop": "end_turn"}
    assert (answer.role, answer.stop_reason) == ("assistant", ends[choice.finish_reason])
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(chat.prompt_token_ids)
    assert usage.output_tokens == len(answer.token_ids)
    counted = client.messages.count_tokens(model=model, system=system["content"], messages=[user])
    assert counted.input_tokens == len(chat.prompt_token_ids)


def test_the_pieces_of_a_stream_are_the_whole_message(client, model):
    asked = {
        "model": model, "max_tokens": 8, "messages": QUESTION, "extra_body": IDS | GREEDY,
    }  # fmt: skip
    whole = client.messages.create(**asked)
    kinds, pieces, last = [], [], None
    with client.messages.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "text":
                pieces.append(event.text)
            if event.type == "message_delta":
                last = event
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert "".join(pieces) == "".join(one.text for one in whole.content)
    assert [one.text for one in final.content] == [one.text for one in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, 8)
    for name in ("prompt_token_ids", "token_ids", "token_logprobs", "weight_versions"):
        assert getattr(last, name) == getattr(whole, name)


def test_an_answer_goes_on_from_a_last_message_of_the_assistant(server: Server, client, model):
    last = {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}
    answer = client.messages.create(
        model=model, max_tokens=8, messages=[*QUESTION, last], extra_body=IDS | GREEDY
    )
    body = {
        "messages": [*QUESTION, {**last, "content": "It is "}], "max_tokens": 8, **IDS, **GREEDY,
        "add_generation_prompt": False, "continue_final_message": True,
    }  # fmt: skip
    chat = server.post("/v1/chat/completions", body).json()
    assert answer.prompt_token_ids == chat["prompt_token_ids"]
    assert answer.token_ids == chat["choices"][0]["token_ids"]
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="expected a last message of the assistant"):
        client.messages.create(
            model=model, max_tokens=8,
            messages=[*QUESTION, {"role": "assistant", "content": [called]}],
        )  # fmt: skip


def test_a_stop_sequence_and_a_full_context_end_a_message(server: Server, client, model):
    asked = {"model": model, "messages": QUESTION, "extra_body": IDS | GREEDY}
    text = client.messages.create(max_tokens=16, **asked).content[0].text
    stop = text[3:6]
    answer = client.messages.create(max_tokens=16, stop_sequences=[stop], **asked)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    counted = client.messages.count_tokens(model=model, messages=QUESTION).input_tokens
    long = [{"role": "user", "content": "a b c d " * 400}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: messages") as caught:
        client.messages.create(model=model, max_tokens=4, messages=long)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    full = server.post(
        "/v1/messages",
        {"messages": QUESTION, "max_tokens": 4000, "ignore_eos": True, **IDS},
    ).json()
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert len(full["token_ids"]) == 512 - counted


def test_a_thought_and_a_call_are_blocks(scripted: Scripted):
    client = anthropic_client(scripted.server)
    asked = {
        "model": scripted.model, "max_tokens": 64, "messages": QUESTION, "tools": [TOOL],
        "extra_body": IDS | GREEDY,
    }  # fmt: skip
    answer = client.messages.create(**asked)
    assert answer.token_ids == scripted.ids
    assert answer.stop_reason == "tool_use"
    thought, text, call = answer.content
    assert (thought.type, thought.thinking.strip()) == ("thinking", THOUGHT)
    assert (text.type, text.text.strip()) == ("text", TALK.strip())
    assert (call.type, call.name, call.input) == ("tool_use", "look_up", ARGUMENTS)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    same = [(one.type, getattr(one, "text", None) or one.type) for one in final.content]
    assert same == [(one.type, getattr(one, "text", None) or one.type) for one in answer.content]
    assert final.content[0].signature
    assert final.content[2].input == ARGUMENTS


def test_the_next_turn_after_a_call_is_that_of_the_same_chat(scripted: Scripted):
    asked = {"messages": QUESTION, "tools": [LOOK_UP], "max_tokens": 64, **IDS, **GREEDY}
    client = anthropic_client(scripted.server)
    first = client.messages.create(
        model=scripted.model, max_tokens=64, messages=QUESTION, tools=[TOOL], extra_body=GREEDY
    )
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a word"}
    second = client.messages.create(
        model=scripted.model, max_tokens=64, tools=[TOOL], extra_body=IDS | GREEDY,
        messages=[
            *QUESTION,
            {"role": "assistant", "content": [one.model_dump() for one in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
    )  # fmt: skip
    # The package would change the order of a function's fields, which the template writes.
    chat = scripted.server.post("/v1/chat/completions", asked).json()
    messages = [
        *QUESTION,
        chat["choices"][0]["message"],
        {"role": "tool", "tool_call_id": "x", "content": "a word"},
        {"role": "user", "content": "And?"},
    ]
    again = scripted.server.post("/v1/chat/completions", {**asked, "messages": messages}).json()
    assert second.prompt_token_ids == again["prompt_token_ids"]
    assert second.token_ids == again["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "look_up"}], ids=["any", "tool"]
)
def test_a_required_call_follows_its_schema(scripted: Scripted, choice):
    # The scripted text has no boolean: the grammar forces one, and the call ends as soon as it may.
    answer = anthropic_client(scripted.server).messages.create(
        model=scripted.model, max_tokens=200, messages=QUESTION, tools=[{**TOOL, "strict": True}],
        tool_choice={**choice, "disable_parallel_tool_use": True},
        extra_body={**GREEDY, "logit_bias": {"0": 90}},
    )  # fmt: skip
    assert answer.stop_reason == "tool_use"
    assert isinstance(answer.content[-1].input["word"], bool)


def test_a_schema_and_thoughts_that_are_off_reach_the_model(scripted: Scripted):
    answer = anthropic_client(scripted.server).messages.create(
        model=scripted.model, max_tokens=64, messages=QUESTION, extra_body=GREEDY,
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )  # fmt: skip
    text = "".join(one.text for one in answer.content if one.type == "text")
    assert isinstance(json.loads(text)["word"], bool)


BLOCKS = {
    "a document": {"type": "document", "source": {"type": "text", "data": "a"}},
    "an image by URL": {"type": "image", "source": {"type": "url", "url": "http://a.invalid/b"}},
    "a redacted thought": {"type": "redacted_thinking", "data": "a"},
    "no type": {"text": "a"},
}


@pytest.mark.parametrize("case", BLOCKS)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_block_that_is_not_served_is_named(server: Server, case: str, role: str):
    body = {"messages": [*QUESTION, {"role": role, "content": [BLOCKS[case]]}], "max_tokens": 1}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("messages[1].content[0]: expected a block of type")
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")


REFUSED = {
    "max_tokens": ({"max_tokens": None}, "max_tokens"),
    "a role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    "no messages": ({"messages": []}, "messages: expected at least one"),
    "a server's tool": ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    "mcp_servers": ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
    "container": ({"container": "a"}, "container"),
    "edits": ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits"),
    "a choice": ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    "system": ({"system": [{"type": "image"}]}, "system[0]"),
    "n": ({"n": 2}, "n: expected 1"),
    "stop": ({"stop": ["a"]}, "stop_sequences"),
    "temperature": ({"temperature": 3}, "temperature"),
    "an effort": ({"output_config": {"effort": "heroic"}}, "output_config.effort"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(server: Server, case: str):
    changed, part = REFUSED[case]
    answer = server.post("/v1/messages", {"messages": QUESTION, "max_tokens": 1, **changed})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["X-Request-Id"]
    assert part in body["error"]["message"]


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="nobody", max_tokens=1, messages=QUESTION)
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_an_unknown_field_is_accepted_and_counted(single_server: Server):
    def counted() -> float:
        lines = single_server.get("/metrics").text.splitlines()
        name = 'titopool_unknown_fields_total{route="/v1/messages"} '
        return sum(float(one.removeprefix(name)) for one in lines if one.startswith(name))

    before = counted()
    body = {"messages": QUESTION, "max_tokens": 1, "new_in_2031": True, "another": None}
    for _ in range(6):
        assert single_server.post("/v1/messages", body).status_code == 200
    assert counted() == before + 6
    named = single_server.log.count("the field 'new_in_2031' is not known here")
    assert 1 <= named <= len(front_ends(single_server))


def test_what_harnesses_send_beside_is_accepted(scripted: Scripted):
    """Marks of caches, beta headers and query, a tool of many, a system message in the middle."""
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": scripted.model, "max_tokens": 32_000, "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "metadata": {"user_id": "user_0_account__session_1"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
            {"type": "text", "text": "You help.", **mark},
        ],
        "tools": [{**TOOL, **mark}, *({**TOOL, "name": f"tool_{n}"} for n in range(2))],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is tito?", **mark}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Two at once.", "signature": "of nobody"},
                {"type": "tool_use", "id": "a", "name": "look_up", "input": ARGUMENTS},
                {"type": "tool_use", "id": "b", "name": "tool_1", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "a word", "is_error": False},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "b"}]},
                {"type": "text", "text": "And?"},
            ]},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Go on."},
        ],
    }  # fmt: skip
    answer = scripted.server.post(
        "/v1/messages?beta=true", body, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a"}
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert answer.json()["stop_reason"] == "tool_use"
    assert LOOK_UP["function"]["name"] in answer.text


def test_an_image_of_a_model_without_images_is_refused(server: Server):
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture(56, 56, 1))}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    answer = server.post("/v1/messages", {"messages": [message], "max_tokens": 1})
    assert answer.status_code == 400
    assert "image" in answer.json()["error"]["message"]
