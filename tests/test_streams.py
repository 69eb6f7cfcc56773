"""Streams of OpenAI's routes: real vLLM through the openai package; faults with a stub engine."""

import http.client
import itertools
import json

import openai
import pytest
from transformers import AutoTokenizer

from tests import reference
from tests.servers import Server, wait_until
from tests.stub_worker import Fault
from tests.test_chat import HELLO
from tests.test_generate import TOLERANCE
from tests.test_openai import IDS

GREEDY = {"temperature": 0, "max_tokens": 12}
WITH_IDS = {"return_token_ids": True, "ignore_eos": True}


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def gathered(chunks) -> dict[int, dict]:
    """What a stream of completions says of each choice."""
    found: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = found.setdefault(
                choice.index, {"text": [], "ids": [], "values": [], "end": None, "offsets": []}
            )
            one["text"].append(choice.text)
            one["ids"] += getattr(choice, "token_ids", None) or []
            if choice.logprobs:
                one["values"] += choice.logprobs.token_logprobs
                one["offsets"] += choice.logprobs.text_offset
            assert one["end"] is None, "a choice went on after its end"
            one["end"] = choice.finish_reason
    return found


def test_a_stream_of_completions_says_what_the_whole_answer_says(client, model, tiny_model):
    fields = {
        "model": model, "prompt": [IDS, IDS[:2]], "logprobs": 2, **GREEDY, "extra_body": WITH_IDS,
    }  # fmt: skip
    whole = client.completions.create(**fields)
    chunks = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    said = gathered(chunks)
    assert sorted(said) == [0, 1]
    for choice in whole.choices:
        one = said[choice.index]
        assert (
            one["ids"]
            == choice.token_ids
            == reference.greedy(tiny_model, choice.prompt_token_ids, 12)
        )
        assert "".join(one["text"]) == choice.text
        # As they come, not at the end.
        assert len(one["text"]) > 4
        assert one["values"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        assert one["offsets"] == choice.logprobs.text_offset
        assert one["end"] == choice.finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])
    first = {one.index: one for chunk in reversed(chunks) for one in chunk.choices}
    assert [first[index].prompt_token_ids for index in (0, 1)] == [IDS, IDS[:2]]


def test_a_stream_of_a_chat(client, model, tiny_model):
    fields = {
        "model": model, "messages": HELLO, "logprobs": True, "top_logprobs": 1, **GREEDY,
        "extra_body": WITH_IDS,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    choices = [chunk.choices[0] for chunk in chunks[1:]]
    (expected,) = whole.choices
    assert "".join(one.delta.content for one in choices) == expected.message.content
    assert [i for one in choices for i in one.token_ids] == expected.token_ids
    entries = [entry for one in choices for entry in one.logprobs.content]
    rows = reference.logprobs(tiny_model, whole.prompt_token_ids, expected.token_ids)
    for row, token_id, entry in zip(rows, expected.token_ids, entries, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert len(entry.top_logprobs) == 1
    assert [one.finish_reason for one in choices] == [None] * (len(choices) - 1) + ["length"]


def test_each_of_n_ends_once_and_usage_grows(client, model):
    chunks = list(
        client.completions.create(
            model=model, prompt=IDS, n=3, seed=5, max_tokens=10, stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            extra_body={"return_token_ids": True},
        )
    )  # fmt: skip
    whole = client.completions.create(
        model=model, prompt=IDS, n=3, seed=5, max_tokens=10, extra_body={"return_token_ids": True}
    )
    said = gathered(chunks)
    assert [said[one.index]["ids"] for one in whole.choices] == [
        one.token_ids for one in whole.choices
    ]
    for index in range(3):
        own = [one for one in chunks if [c.index for c in one.choices] == [index]]
        counts = [chunk.usage.completion_tokens for chunk in own]
        # A chunk has what has come since the last one: mostly a token, sometimes two.
        assert all(a < b for a, b in itertools.pairwise(counts))
        assert counts[-1] == len(said[index]["ids"])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_text_behind_a_stop_string_is_never_sent(client, model, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = tokenizer.decode(reference.greedy(tiny_model, IDS, 12))
    # It begins and ends inside tokens.
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    fields = {"model": model, "prompt": IDS, "stop": [stop], **GREEDY}
    (whole,) = client.completions.create(**fields).choices
    one = gathered(client.completions.create(**fields, stream=True))[0]
    assert "".join(one["text"]) == whole.text == text[: text.index(stop)]
    assert one["end"] == "stop"


@pytest.mark.parametrize("max_tokens", [200, 5])
def test_characters_are_sent_whole(client, model, max_tokens):
    # Snowmen are three tokens each here; the shorter one ends amid the second.
    fields = {
        "model": model, "prompt": IDS, "max_tokens": max_tokens,
        "extra_body": {"structured_outputs": {"choice": ["☃☃é☃"]}, "return_token_ids": True},
    }  # fmt: skip
    (whole,) = client.completions.create(**fields).choices
    one = gathered(client.completions.create(**fields, stream=True))[0]
    assert one["ids"] == whole.token_ids
    assert "".join(one["text"]) == whole.text
    assert len(one["text"]) > 2
    if max_tokens == 200:
        assert whole.text == "☃☃é☃"
    assert not any("\ufffd" in piece for piece in one["text"][:-1])


def test_a_client_that_leaves_a_stream_stops_it(server: Server):
    def under_way() -> float:
        return sum(server.metrics("sequences").values())

    wait_until(lambda: under_way() == 0, 10)
    aborted = sum(server.metrics("aborted_jobs_total").values())
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    body = {"prompt": IDS, "n": 100, "max_tokens": 500, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: {")
    wait_until(lambda: under_way() == 100, 20)
    answer.close()
    connection.close()
    wait_until(lambda: under_way() == 0, 20)
    # Had it ended by itself, it would count as completed.
    assert sum(server.metrics("aborted_jobs_total").values()) == aborted + 1


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"prompt": [5000]}, "prompt[0]"),
        ({"prompt": IDS, "stream_options": {"include_usages": True}}, "include_usages"),
        ({"prompt": IDS, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": IDS, "stream": False, "stream_options": {}}, "stream_options"),
        ({"prompt": IDS, "structured_outputs": {"grammar": "root ::= ("}}, "grammar"),
    ],
)
def test_what_fails_before_the_first_token_is_no_stream(server: Server, fields, part):
    answer = server.post("/v1/completions", {"stream": True, **fields})
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


# ---- faults --------------------------------------------------------------------------


def of_stub(server: Server, prompt: list[int], **fields):
    return client_of(server).completions.create(
        model="stub", prompt=prompt, stream=True, max_tokens=100,
        extra_body={"return_token_ids": True}, **fields,
    )  # fmt: skip


def test_a_worker_that_dies_amid_a_stream_ends_it_with_an_error(start_stub, stub_server):
    for index in range(2):
        start_stub(index, "--delay-s", "0.2")
    server = stub_server(2)
    seen: list[int] = []
    chunks = of_stub(server, [1, 2, 3, Fault.DIE_MID_STREAM, 5])
    with pytest.raises(openai.APIError) as caught:
        seen.extend(i for chunk in chunks for i in chunk.choices[0].token_ids)
    # Not begun anew on the other worker: it would sample other tokens.
    assert seen == [5]
    assert caught.value.code == "generation_failed"
    assert "during the stream" in caught.value.message
    assert [i for one in of_stub(server, [1, 2]) for i in one.choices[0].token_ids] == [2, 1]


def test_a_stream_that_takes_too_long_ends_with_an_error(start_stub, stub_server):
    start_stub(0, "--delay-s", "0.4")
    server = stub_server(1, "--request-timeout-s", "1")
    with pytest.raises(openai.APIError) as caught:
        list(of_stub(server, list(range(50))))
    # It would take 20 s, and the next one for ever.
    assert caught.value.code == "deadline_passed"
    with pytest.raises(openai.InternalServerError) as caught:
        list(of_stub(server, [Fault.HANG]))
    assert caught.value.status_code == 504


def test_a_stream_holds_its_place_until_it_ends(start_stub, stub_server):
    start_stub(0, "--delay-s", "0.3")
    server = stub_server(1, "--max-open-requests", "1", "--num-front-ends", "1")
    chunks = iter(of_stub(server, [1, 2, 3, 4]))
    next(chunks)
    with pytest.raises(openai.RateLimitError):
        of_stub(server, [1])
    assert len(list(chunks)) == 3
    assert len(list(of_stub(server, [1]))) == 1


def test_many_streams_at_once(start_stub, stub_server):
    import concurrent.futures

    start_stub(0, "--delay-s", "0.05", "--max-num-seqs", "512")
    server = stub_server(1)

    def ids(seed: int) -> list[int]:
        prompt = [seed, *range(10)]
        return [i for one in of_stub(server, prompt) for i in one.choices[0].token_ids]

    with concurrent.futures.ThreadPoolExecutor(64) as threads:
        for seed, made in enumerate(threads.map(ids, range(64))):
            assert made == [*range(9, -1, -1), seed]


def test_a_wrong_key_is_an_authentication_error(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1, TITOPOOL_API_KEY="right")
    with pytest.raises(openai.AuthenticationError) as caught:
        client_of(server, "wrong").completions.create(model="stub", prompt=[1])
    assert caught.value.code == "invalid_api_key"
    assert client_of(server, "right").completions.create(model="stub", prompt=[1]).choices
