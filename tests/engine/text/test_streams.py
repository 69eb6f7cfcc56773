"""Streams of OpenAI's routes: real vLLM through the openai package; failures with a stub engine."""

import http.client
import itertools
import json
from collections.abc import Iterator

import openai
import pytest
from transformers import AutoTokenizer

from app.call.streams import _pieces
from app.outputs.json_parts import Rows
from harness.servers import Server, wait_until
from harness.stub_worker import Fault
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE
from tests.kit.peers.openai_calls import HELLO, IDS, client_of, gathered
from titopool.errors import GenerationFailed

GREEDY = {"temperature": 0, "max_tokens": 12}
WITH_IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_completion_stream_equals_the_unstreamed_answer(client, model, tiny_model):
    fields = {
        "model": model, "prompt": [IDS, IDS[:2]], "logprobs": 2, **GREEDY, "extra_body": WITH_IDS,
    }  # fmt: skip
    whole = client.completions.create(**fields)
    chunks = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    streamed = gathered(chunks)
    assert sorted(streamed) == [0, 1]
    for choice in whole.choices:
        one = streamed[choice.index]
        assert (
            one["ids"]
            == choice.token_ids
            == reference.greedy(tiny_model, choice.prompt_token_ids, 12)
        )
        assert "".join(one["text"]) == choice.text
        # Text arrives in several chunks, not all at the end.
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


def test_a_chat_stream_equals_the_unstreamed_answer(client, model, tiny_model):
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


def test_each_of_n_completions_ends_once_and_usage_grows(client, model):
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
    streamed = gathered(chunks)
    assert [streamed[one.index]["ids"] for one in whole.choices] == [
        one.token_ids for one in whole.choices
    ]
    for index in range(3):
        own = [one for one in chunks if [c.index for c in one.choices] == [index]]
        counts = [chunk.usage.completion_tokens for chunk in own]
        # A chunk has all tokens since the previous chunk: mostly one, sometimes two.
        assert all(a < b for a, b in itertools.pairwise(counts))
        assert counts[-1] == len(streamed[index]["ids"])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_an_event_that_cannot_be_made_leaves_no_part_of_it():
    """Any error of its rows was taken for a long event, which began and broke."""

    def rows() -> Iterator[object]:
        yield 1
        raise GenerationFailed("no such token")

    pieces = _pieces([{"a": 1}, {"a": Rows(rows())}], has_names=False)
    assert next(pieces) == b'data: {"a":1}\n\n'
    with pytest.raises(GenerationFailed):
        next(pieces)
    with pytest.raises(TypeError, match="64-bit"):
        list(_pieces([{"a": 2**70}], has_names=False))
    long, short = {"a": iter([1, 2])}, {"a": Rows([3])}
    assert b"".join(_pieces([long, short], has_names=False)) == (
        b'data: {"a":[1,2]}\n\ndata: {"a":[3]}\n\n'
    )


def test_events_before_an_error_are_sent():
    def events():
        yield {"type": "first"}
        raise GenerationFailed("staged")

    pieces = _pieces(events(), has_names=True)
    assert next(pieces) == b'event: first\ndata: {"type":"first"}\n\n'
    with pytest.raises(GenerationFailed, match="staged"):
        next(pieces)


def test_text_after_a_stop_string_is_never_sent(client, model, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = tokenizer.decode(reference.greedy(tiny_model, IDS, 12))
    # The stop string begins and ends inside tokens.
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    fields = {"model": model, "prompt": IDS, "stop": [stop], **GREEDY}
    (whole,) = client.completions.create(**fields).choices
    one = gathered(client.completions.create(**fields, stream=True))[0]
    assert "".join(one["text"]) == whole.text == text[: text.index(stop)]
    assert one["end"] == "stop"


@pytest.mark.parametrize("max_tokens", [200, 5])
def test_a_character_is_never_split_between_chunks(client, model, max_tokens):
    # A snowman is three tokens here; the shorter completion ends inside the second snowman.
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


def test_a_client_that_hangs_up_stops_its_stream(server: Server):
    def num_in_flight() -> float:
        return sum(server.metrics("sequences").values())

    wait_until(lambda: num_in_flight() == 0, 10)
    aborted = sum(server.metrics("aborted_jobs_total").values())
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    body = {"prompt": IDS, "n": 100, "max_tokens": 500, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: {")
    wait_until(lambda: num_in_flight() == 100, 20)
    answer.close()
    connection.close()
    wait_until(lambda: num_in_flight() == 0, 20)
    # A job that had ended by itself would count as completed.
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
def test_an_error_before_the_first_token_is_a_plain_response(server: Server, fields, part):
    answer = server.post("/v1/completions", {"stream": True, **fields})
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


# ---- faults --------------------------------------------------------------------------


def stub_stream(server: Server, prompt: list[int], **fields):
    return client_of(server).completions.create(
        model="stub", prompt=prompt, stream=True, max_tokens=100,
        extra_body={"return_token_ids": True}, **fields,
    )  # fmt: skip


def test_a_worker_that_dies_during_a_stream_ends_it_with_an_error(start_stub, stub_server):
    for index in range(2):
        start_stub(index, "--delay-s", "0.2")
    server = stub_server(2)
    seen: list[int] = []
    chunks = stub_stream(server, [1, 2, 3, Fault.DIE_MID_STREAM, 5])
    with pytest.raises(openai.APIError) as caught:
        seen.extend(i for chunk in chunks for i in chunk.choices[0].token_ids)
    # The job is not run again on the other worker: it would sample other tokens.
    assert seen == [5]
    assert caught.value.code == "generation_failed"
    assert "during the stream" in caught.value.message
    assert [i for one in stub_stream(server, [1, 2]) for i in one.choices[0].token_ids] == [2, 1]


def test_a_stream_that_times_out_ends_with_an_error(start_stub, stub_server):
    start_stub(0, "--delay-s", "0.4")
    server = stub_server(1, "--request-timeout-s", "1")
    with pytest.raises(openai.APIError) as caught:
        list(stub_stream(server, list(range(50))))
    # The job takes 20 s; the next one would never end.
    assert caught.value.code == "deadline_passed"
    with pytest.raises(openai.InternalServerError) as caught:
        list(stub_stream(server, [Fault.HANG]))
    assert caught.value.status_code == 504


def test_a_stream_counts_as_an_open_request_until_it_ends(start_stub, stub_server):
    start_stub(0, "--delay-s", "0.3")
    server = stub_server(1, "--max-open-requests", "1", "--num-front-ends", "1")
    chunks = iter(stub_stream(server, [1, 2, 3, 4]))
    next(chunks)
    with pytest.raises(openai.RateLimitError):
        stub_stream(server, [1])
    assert len(list(chunks)) == 3
    assert len(list(stub_stream(server, [1]))) == 1


def test_many_concurrent_streams_get_their_own_tokens(start_stub, stub_server):
    import concurrent.futures

    start_stub(0, "--delay-s", "0.05", "--max-num-seqs", "512")
    server = stub_server(1)

    def ids(seed: int) -> list[int]:
        prompt = [seed, *range(10)]
        return [i for one in stub_stream(server, prompt) for i in one.choices[0].token_ids]

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
