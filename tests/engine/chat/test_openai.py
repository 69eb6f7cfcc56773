"""OpenAI's routes with the unmodified openai package, over real vLLM."""

import json
import re

import openai
import pytest
from transformers import AutoTokenizer

from harness.servers import Server
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE
from tests.kit.peers.openai_calls import HELLO, IDS, rendered

GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str):
    return AutoTokenizer.from_pretrained(tiny_model)


def text_of(tokenizer, ids: list[int]) -> str:
    """The text of `ids` as vLLM returns it: without an incomplete character at the end."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.rstrip("\ufffd")


def test_a_continued_message_keeps_its_role(server: Server):
    for stream in (False, True):
        for role in ("user", "assistant"):
            body = {
                "messages": [{"role": role, "content": "Hel"}], "max_tokens": 1, "stream": stream,
                "add_generation_prompt": False, "continue_final_message": True,
            }  # fmt: skip
            text = server.post("/v1/chat/completions", body).text
            assert re.search(rf'"role": ?"{role}"', text), text


def test_completions_give_the_text_of_the_ids(client, model, tiny_model, tokenizer):
    text = "Hello, world"
    answer = client.completions.create(
        model=model, prompt=[text, text + "!"], **GREEDY,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    for index, choice in enumerate(answer.choices):
        ids = tokenizer(text + "!" * index)["input_ids"]
        assert choice.index == index
        assert choice.prompt_token_ids == ids
        assert choice.token_ids == reference.greedy(tiny_model, ids, 8)
        assert choice.text == text_of(tokenizer, choice.token_ids)
        assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 16


def test_completions_accept_ids(client, model, tiny_model):
    for prompt in (IDS, [IDS, IDS]):
        answer = client.completions.create(
            model=model, prompt=prompt, **GREEDY,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        for choice in answer.choices:
            assert choice.token_ids == reference.greedy(tiny_model, IDS, 8)


def test_completions_return_logprobs(client, model, tiny_model, tokenizer):
    answer = client.completions.create(
        model=model, prompt=IDS, max_tokens=6, logprobs=3, seed=3,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    (choice,) = answer.choices
    rows = reference.logprobs(tiny_model, IDS, choice.token_ids)
    expected = rows[range(len(choice.token_ids)), choice.token_ids].tolist()
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=TOLERANCE)
    for token, token_id in zip(choice.logprobs.tokens, choice.token_ids, strict=True):
        alone = tokenizer.decode([token_id])
        # A character split over tokens is shown at its last token.
        assert token == alone or alone.endswith("\ufffd")
    assert all(3 <= len(one) <= 4 for one in choice.logprobs.top_logprobs)


def test_chat_completions_equal_transformers(client, model, tiny_model, tokenizer):
    answer = client.chat.completions.create(
        model=model, messages=HELLO, n=1, logprobs=True, top_logprobs=2, **GREEDY,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    ids = rendered(tokenizer, HELLO)
    (choice,) = answer.choices
    assert answer.prompt_token_ids == ids
    assert choice.token_ids == reference.greedy(tiny_model, ids, 8)
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(tokenizer, choice.token_ids)
    rows = reference.logprobs(tiny_model, ids, choice.token_ids)
    for row, token_id, entry in zip(rows, choice.token_ids, choice.logprobs.content, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(
            row.topk(2).values.tolist(), abs=TOLERANCE
        )


def test_logprobs_name_tokens_by_id_on_request(client, model):
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=3, logprobs=True,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
    )  # fmt: skip
    (choice,) = answer.choices
    assert [one.token for one in choice.logprobs.content] == [
        f"token_id:{one}" for one in choice.token_ids
    ]


def test_stop_strings_end_the_text(client, model, tokenizer, tiny_model):
    ids = reference.greedy(tiny_model, IDS, 8)
    stop = tokenizer.decode(ids)[3:5]
    answer = client.completions.create(model=model, prompt=IDS, stop=[stop], **GREEDY)
    (choice,) = answer.choices
    assert stop not in choice.text
    assert tokenizer.decode(ids).startswith(choice.text)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_chat_completions_use_the_given_ids(server: Server, model, tiny_model):
    # The messages are not rendered: the last one could not be.
    call = {"type": "function", "function": {"name": "f", "arguments": "{bad"}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    body = {
        "model": model, "messages": messages, "tokens": IDS, "temperature": 0, "max_tokens": 5,
        "logprobs": True, "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    answer = server.post("/v1/chat/completions/tokens", body).json()
    assert answer["prompt_token_ids"] == IDS
    assert answer["choices"][0]["token_ids"] == reference.greedy(tiny_model, IDS, 5)


def test_prompt_logprobs_equal_transformers(client, model, tiny_model, tokenizer):
    expected = reference.logprobs(tiny_model, IDS[:1], IDS[1:])
    (choice,) = client.completions.create(
        model=model, prompt=IDS, max_tokens=1, extra_body={"prompt_logprobs": 2}
    ).choices
    chat = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=1,
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )  # fmt: skip
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids)
    first, *others = choice.prompt_logprobs
    assert first is None
    for row, token_id, entries in zip(expected, IDS[1:], others, strict=True):
        entry = entries[str(token_id)]
        assert entry["logprob"] == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert entry["rank"] == 1 + (row > row[token_id]).sum().item()
        assert entry["decoded_token"] == tokenizer.decode([token_id])
        best = {str(one) for one in row.topk(2).indices.tolist()}
        assert best <= entries.keys() <= best | {str(token_id)}


@pytest.mark.parametrize("prompt", [IDS, "Hello, world!"])
def test_an_echo_begins_with_the_prompt_s_text_and_logprobs(
    client, model, tiny_model, tokenizer, prompt
):
    ids = prompt if isinstance(prompt, list) else tokenizer(prompt)["input_ids"]
    text, n = tokenizer.decode(ids), len(ids)
    fields = {"model": model, "prompt": prompt, "logprobs": 2, **GREEDY}
    (plain,) = client.completions.create(**fields).choices
    rows = reference.logprobs(tiny_model, ids[:1], ids[1:])
    for choice in client.completions.create(**fields, echo=True).choices:
        assert choice.text == text + plain.text
        found, own = choice.logprobs, plain.logprobs
        assert found.tokens == [*(tokenizer.decode([one]) for one in ids), *own.tokens]
        assert found.text_offset[n:] == [len(text) + one for one in own.text_offset]
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        expected = [*rows[range(n - 1), ids[1:]].tolist(), *own.token_logprobs]
        assert found.token_logprobs[1:] == pytest.approx(expected, abs=TOLERANCE)
        for row, best in zip(rows, found.top_logprobs[1:n], strict=True):
            greatest = tokenizer.decode([row.argmax().item()])
            assert best[greatest] == pytest.approx(row.max().item(), abs=TOLERANCE)


def test_completions_take_the_body_of_a_chat_that_was_turned_into_ids(server: Server, model):
    body = {"model": model, "prompt": IDS, "temperature": 0, "return_token_ids": True}
    expected = server.post("/v1/completions", {**body, "logprobs": 2, "max_tokens": 4}).json()
    answer = server.post(
        "/v1/completions",
        {
            **body, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4,
            "parallel_tool_calls": True, "tool_choice": "auto", "add_special_tokens": False,
            "chat_template_kwargs": {}, "use_beam_search": False, "nvext": {"a": 1},
        },
    ).json()  # fmt: skip
    assert answer["choices"] == expected["choices"]
    (choice,) = server.post("/v1/completions", {**body, "logprobs": False}).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("others", [{}, {"return_token_ids": True}])
def test_weight_versions_in_vllms_form(server: Server, model, others):
    version = server.get("/ready").json()["workers"][0]["weight_version"]
    options = {"max_tokens": 3, "ignore_eos": True, "return_weight_versions": True, **others}
    spans = [{"version": str(version), "start": 0, "end": 3}]
    for path, prompt in (
        ("completions", {"prompt": IDS}),
        ("chat/completions", {"messages": HELLO}),
    ):
        body = {"model": model, **prompt, **options}
        (choice,) = server.post(f"/v1/{path}", body).json()["choices"]
        assert choice["weight_versions"] == spans
        lines = server.post(f"/v1/{path}", body | {"stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["weight_versions"] == spans


def test_a_json_schema_guides_the_answer(client, model):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=60, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    text = answer.choices[0].message.content
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text)["a"], bool)
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "options, part",
    [
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"no_such": 1}}, "no_such"),
        ({"extra_body": {"detokenize": False}}, "detokenize"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 500}}, "prompt_logprobs"),
        (
            {"extra_body": {"add_generation_prompt": True, "continue_final_message": True}},
            "continue_final_message",
        ),
        ({"extra_body": {"priority": 3}}, "priority"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"n": 0}, "n:"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 9}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": -7}, "top_logprobs"),
        ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
        ({"extra_body": {"logprob_token_ids": [1]}}, "logprob_token_ids"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 500}, "logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"tokens": [1]}}, "tokens"),
    ],
)
def test_bad_fields_are_bad_requests(client, model, options, part):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": model, "messages": HELLO, **options})
    assert part in caught.value.message
    answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=1)
    assert len(answer.choices) == 1


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], [[2048]], [True], "", [[]], None])
def test_bad_prompts_are_bad_requests(server: Server, model, prompt):
    answer = server.post("/v1/completions", {"model": model, "prompt": prompt})
    assert answer.status_code == 400, answer.text
    assert "prompt" in answer.json()["error"]["message"]


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-2", prompt="a")
    assert caught.value.code == "model_not_found"
