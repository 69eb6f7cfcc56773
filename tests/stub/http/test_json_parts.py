"""Long answers are written item by item, and take little more memory than their bytes."""

import tracemalloc
from base64 import b64decode
from collections.abc import Iterator

import msgspec
import numpy as np
import orjson
import pytest
import requests

from app.http.responses import PIECE_BYTES, json_line, json_response
from app.outputs.json_parts import Rows, json_parts
from app.trl.sequence_logprobs import ROWS_AT_ONCE, _padded
from harness.memory_growth import front_end, growth_of
from tests.conftest import StartStub

NUM_PROMPTS, NUM_IDS = 64, 8192
# Of 20 log-probabilities of the ids from 0 to NUM_IDS: the best 20, and the sampled one if it is another.
NUM_ENTRIES = 20 * 20 + 21 * (NUM_IDS - 20)


@pytest.mark.parametrize("items", [[], [[1, 2]], [{"a": None}, [float("nan")], "é", [[], {}]]])
def test_iterators_are_lists(items: list[object]):
    fields = {"first": {"x": [1]}, "items": items, "same": items, "last": None}
    made = json_parts(fields | {"items": iter(items), "same": iter(items)})
    assert b"".join(made) == orjson.dumps(fields) + b"\n"


def test_arrays_are_lists_and_no_fields_are_an_object():
    values = np.array([-1.6612, np.nan, -np.inf], dtype=np.float32)
    read = orjson.loads(b"".join(json_parts({"one": iter([values]), "other": values})))
    assert read["one"] == [read["other"]]
    assert (np.float32(read["other"][0]), read["other"][1:]) == (values[0], [None, None])
    assert b"".join(json_parts({})) == b"{}\n"


def test_parts_are_no_shorter_than_a_write_and_items_are_encoded_as_they_come():
    item = ["0123456789"] * 1000
    num_items = 500
    tracemalloc.start()
    lengths = [len(part) for part in json_parts({"items": (list(item) for _ in range(num_items))})]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(lengths) > num_items * len(item) * 12
    assert all(length >= PIECE_BYTES for length in lengths[:-1])
    # A part, and the item that ends it.
    assert peak < 16 * PIECE_BYTES


def test_wide_rows_are_encoded_one_at_a_time():
    """64 of 20,000 log-probabilities each took 805 MiB."""
    made = []

    def rows() -> Iterator[list[dict[str, float]] | None]:
        # As the first token of a prompt.
        yield None
        for number in range(20):
            made.append(number)
            yield [{"logprob": -1.5}] * 20_000

    parts = json_parts({"items": Rows(rows())})
    assert next(parts)
    assert len(made) <= 2
    assert len(orjson.loads(b"".join(json_parts({"items": Rows(rows())})))["items"]) == 21
    narrow = Rows([number] for number in range(1000))
    assert orjson.loads(b"".join(json_parts(narrow))) == [[number] for number in range(1000)]


@pytest.mark.parametrize("num_padded", [0, ROWS_AT_ONCE])
def test_an_array_in_base64_has_all_its_rows_and_those_that_it_lacks(num_padded: int):
    array = np.arange(2 * (ROWS_AT_ONCE + 5), dtype=np.int32).reshape(-1, 2)
    made = _padded([array], len(array) + num_padded, -1)
    read = np.frombuffer(b64decode(b"".join(made.pieces())), np.int32).reshape(-1, 2)
    expected = np.pad(array, ((0, num_padded), (0, 0)), constant_values=-1)
    assert np.array_equal(read, expected)


def test_a_long_answer_takes_little_more_memory_than_its_bytes(start_stub: StartStub, stub_server):
    start_stub(0, "--max-model-len", str(2 * NUM_IDS))
    server = stub_server(1, "--num-front-ends", "1")
    body = {
        "prompt": [[(7 * n + i) % 900 + 1 for i in range(NUM_IDS)] for n in range(NUM_PROMPTS)],
        "max_tokens": NUM_IDS, "logprobs": 0, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    assert server.post("/v1/completions", body | {"prompt": [[1, 2]]}).status_code == 200
    with growth_of(front_end(server)) as growth:
        # Without `Server.post`, which takes seconds to check so long an answer against the document.
        answer = requests.post(server.url + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert len(orjson.loads(answer.content)["choices"]) == NUM_PROMPTS
    # All choices as objects at once take 8.8 times the bytes.
    assert 0.2 < growth.num_bytes / len(answer.content) < 2.5


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
def test_arrays_are_given_up_as_they_are_written_and_with_the_request(
    accept: str, start_stub: StartStub, stub_server
):
    start_stub(0, "--max-model-len", str(2 * NUM_IDS))
    server = stub_server(1, "--num-front-ends", "1")
    process = front_end(server)
    # The stub's completions are as long as their prompts.
    body = {"prompts": [[*range(NUM_IDS)]] * 24, "max_tokens": NUM_IDS, "logprobs": 20}
    assert server.post("/generate/", body | {"prompts": [[1, 2]]}).status_code == 200
    before = process.memory_info().rss
    for _ in range(3):
        with growth_of(process) as growth:
            answer = requests.post(
                server.url + "/generate/", json=body, headers={"Accept": accept}, timeout=120
            )
        assert answer.status_code == 200, answer.text
        # The arrays alone take 1.0 times the bytes of either answer; all at once with JSON 2.1.
        assert 0.5 < growth.num_bytes / len(answer.content) < 1.6
    # No cycle keeps the results until garbage is collected: three requests would be 3.0.
    assert process.memory_info().rss - before < 0.8 * len(answer.content)
    decode = msgspec.msgpack.decode if accept.endswith("msgpack") else orjson.loads
    found = decode(answer.content)
    sizes = [sum(len(one) for one in found[name]) for name in ("completion_ids", "logprobs")]
    if accept.endswith("msgpack"):
        assert sizes == [24 * 4 * NUM_IDS, 24 * 4 * NUM_ENTRIES]
        assert found["completion_ids"][-1] == np.arange(NUM_IDS, dtype=np.int32)[::-1].tobytes()
    else:
        assert sizes == [24 * NUM_IDS, 24 * NUM_IDS]
        assert found["completion_ids"][-1] == [*range(NUM_IDS)][::-1]
        for name in ("logprobs", "logprob_token_ids"):
            assert sum(map(len, found[name][-1])) == NUM_ENTRIES


def test_every_json_answer_ends_its_line():
    assert json_response({"a": 1}).get_data() == b'{"a":1}\n'
    assert json_line({"a": np.ones(1)}) == b'{"a":[1.0]}\n'
