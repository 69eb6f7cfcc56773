"""Chunks of several tokens: they join to the whole answer, and their size follows the number of streams."""

import gc
import weakref
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from harness.servers import running_server
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE
from tests.kit.peers.openai_calls import IDS, client_of, gathered
from titopool.errors import GenerationFailed
from titopool.settings.logs import current_request
from titopool.wire.messages import Job
from workers.engine.outputs.completions import ChunkSender, Stream
from workers.engine.outputs.streams import OpenStreams
from workers.engine.versions import History

WITH_IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def in_threes(tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    options = (*ENGINE_OPTIONS, "--num-workers", "1", "--num-front-ends", "1")
    with running_server(tiny_model, *options, "--stream-interval", "3", log=log) as server:
        client = client_of(server)
        yield client, client.models.list().data[0].id


def test_chunks_of_three_tokens_join_to_the_whole_answer(in_threes, tiny_model):
    client, model = in_threes
    fields = {
        "model": model, "prompt": [IDS, IDS[:2]], "logprobs": 2, "temperature": 0, "max_tokens": 14,
        "extra_body": WITH_IDS,
    }  # fmt: skip
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    streamed = gathered(chunks)
    for choice in whole.choices:
        one = streamed[choice.index]
        prompt = choice.prompt_token_ids
        assert one["ids"] == choice.token_ids == reference.greedy(tiny_model, prompt, 14)
        assert "".join(one["text"]) == choice.text
        assert one["values"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        rows = reference.logprobs(tiny_model, prompt, one["ids"])
        expected = [row[i].item() for row, i in zip(rows, one["ids"], strict=True)]
        assert one["values"] == pytest.approx(expected, abs=TOLERANCE)
        assert one["offsets"] == choice.logprobs.text_offset
        assert one["end"] == "length"
        sizes = sizes_of(chunks, choice.index)
        assert sizes[0] == 1
        assert max(sizes) == 3
        assert set(sizes[2:-1]) == {3}


def sizes_of(chunks, index: int) -> list[int]:
    """The number of tokens of each chunk of a choice."""
    return [len(one.token_ids) for chunk in chunks for one in chunk.choices if one.index == index]


def test_a_stop_string_within_a_chunk_ends_the_completion_there(in_threes):
    client, model = in_threes
    fields = {"model": model, "prompt": IDS, "temperature": 0, "max_tokens": 14, "logprobs": 0}
    whole = client.completions.create(**fields, extra_body=WITH_IDS)
    tokens = whole.choices[0].logprobs.tokens
    stop = next(token for token in tokens[4:] if token.strip() and token.isascii())
    fields |= {"stop": stop, "extra_body": WITH_IDS}
    (expected,) = client.completions.create(**fields).choices
    (one,) = gathered(client.completions.create(**fields, stream=True)).values()
    assert (one["ids"], "".join(one["text"]), one["end"]) == (
        expected.token_ids, expected.text, "stop",
    )  # fmt: skip
    assert len(one["ids"]) == len(one["values"]) < 14


def test_each_of_n_completions_joins_to_its_own_ids(in_threes):
    client, model = in_threes
    fields = {"model": model, "prompt": IDS, "n": 3, "seed": 5, "max_tokens": 10, "logprobs": 0}
    whole = client.completions.create(**fields, extra_body=WITH_IDS)
    chunks = list(client.completions.create(**fields, stream=True, extra_body=WITH_IDS))
    streamed = gathered(chunks)
    for one in whole.choices:
        assert streamed[one.index]["ids"] == one.token_ids
        sizes = sizes_of(chunks, one.index)
        assert (sizes[0], max(sizes)) == (1, 3)


class Detokenizer:
    """vLLM's, without a tokenizer."""

    def __init__(self) -> None:
        self.output_token_ids: list[int] = []

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        return ""


class State(SimpleNamespace):
    """vLLM's RequestState; may be referenced weakly."""


class Processor:
    """vLLM's OutputProcessor, with one completion a request."""

    def __init__(self) -> None:
        self.request_states: dict[str, State] = {}

    def add_request(self, request: SimpleNamespace) -> None:
        self.request_states[request.request_id] = State(
            detokenizer=Detokenizer(), num_cached_tokens=0,
            logprobs_processor=SimpleNamespace(logprobs=None), errors=[],
            make_request_output=lambda ids, pooled, reason: f"the output at {reason}",
        )  # fmt: skip
        state = self.request_states[request.request_id]
        state.queue = SimpleNamespace(put=state.errors.append)

    def step(self, name: str) -> object:
        """A token of a request."""
        state = self.request_states[name]
        state.detokenizer.output_token_ids.append(7)
        return state.make_request_output([7], None, None)


def stream_to(sizes: list[int], parsing: Any = None, history: Any = lambda: History(0)) -> Stream:
    """A stream that notes the number of tokens of each chunk."""
    job = Job(1, 1, b"\0\0\0\0", 1, 9, b"", is_streamed=True)
    sender = ChunkSender(
        job, lambda chunk: sizes.append(len(chunk.pieces[0][1].token_ids) // 4), None
    )
    return Stream(0, sender, parsing, history, None)


def request_named(name: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=name + "-internal", external_req_id=name)


@pytest.mark.parametrize(
    ("setting", "num_streams", "interval"),
    [(0, 1, 1), (0, 127, 1), (0, 128, 2), (0, 512, 4), (1, 512, 1), (8, 1, 8)],
)
def test_the_size_of_chunks_follows_the_number_of_streams(setting, num_streams, interval):
    streams, processor = OpenStreams(setting), Processor()
    streams.tap(processor)
    sizes: list[list[int]] = [[] for _ in range(num_streams)]
    with ExitStack() as stack:
        for index in range(num_streams):
            stack.enter_context(streams.open(str(index), stream_to(sizes[index])))
            processor.add_request(request_named(str(index)))
        for _ in range(33):
            for name in processor.request_states:
                assert processor.step(name) is None
    for one in sizes:
        assert one[0] == 1
        assert set(one[2:]) == {interval}
    # Second chunks of each size: not all streams send at the same steps.
    assert {one[1] for one in sizes} == set(range(1, interval + 1)) or num_streams < interval
    assert streams.interval == (setting or 1)


def test_only_a_stream_s_last_output_is_vllms():
    streams, processor = OpenStreams(0), Processor()
    streams.tap(processor)
    with streams.open("a", stream_to([])):
        processor.add_request(request_named("a"))
        processor.add_request(request_named("whole"))
    assert processor.step("a-internal") is None
    state = processor.request_states["a-internal"]
    assert state.make_request_output([7], None, "length") == "the output at length"
    assert processor.step("whole-internal") == "the output at None"


def test_a_chunk_that_cannot_be_made_fails_its_own_request():
    streams, processor = OpenStreams(0), Processor()
    streams.tap(processor)
    with streams.open("a", stream_to([], history=lambda: None)):
        processor.add_request(request_named("a"))
        assert processor.step("a-internal") is None
    (error,) = processor.request_states["a-internal"].errors
    assert isinstance(error, GenerationFailed)


def test_a_parser_of_vllms_gets_one_token_at_a_time():
    streams, processor = OpenStreams(8), Processor()
    streams.tap(processor)
    sizes: list[int] = []
    parsing = SimpleNamespace(parse=lambda index, text, ids, reason, deliver: deliver(({}, reason)))
    with streams.open("a", stream_to(sizes, parsing)):
        processor.add_request(request_named("a"))
        for _ in range(9):
            processor.step("a-internal")
    assert sizes == [1] * 9


def test_a_completion_that_has_ended_is_freed_at_once():
    streams, processor = OpenStreams(0), Processor()
    streams.tap(processor)
    with streams.open("a", stream_to([])):
        processor.add_request(request_named("a"))
        processor.step("a-internal")
        state = processor.request_states.pop("a-internal")
        state.make_request_output([7], None, "length")
    freed = weakref.ref(state)
    gc.disable()
    try:
        del state
        assert freed() is None
    finally:
        gc.enable()


def test_log_lines_of_a_chunk_name_its_request():
    streams, processor = OpenStreams(0), Processor()
    streams.tap(processor)
    named = []
    parsing = SimpleNamespace(parse=lambda *_: named.append(current_request.get()))
    token = current_request.set("mine")
    stream = stream_to([], parsing)
    current_request.reset(token)
    with streams.open("a", stream):
        processor.add_request(request_named("a"))
        processor.step("a-internal")
    assert named == ["mine"]
