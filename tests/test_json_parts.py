"""Long answers are written item by item, and take little more memory than their bytes."""

import tracemalloc

import numpy as np
import orjson
import pytest

from app.http.responses import PIECE_BYTES
from app.outputs.json_parts import json_parts
from tests.conftest import StartStub
from tests.test_hostile_bodies import front_end, growth_of

NUM_PROMPTS, NUM_IDS = 64, 8192


@pytest.mark.parametrize("items", [[], [[1, 2]], [{"a": None}, [float("nan")], "é", [[], {}]]])
def test_iterators_are_lists(items: list[object]):
    fields = {"first": {"x": [1]}, "items": items, "same": items, "last": None}
    made = json_parts(fields | {"items": iter(items), "same": iter(items)})
    assert b"".join(made) == orjson.dumps(fields)


def test_arrays_are_lists_and_no_fields_are_an_object():
    values = np.array([-1.6612, np.nan, -np.inf], dtype=np.float32)
    read = orjson.loads(b"".join(json_parts({"one": iter([values]), "other": values})))
    assert read["one"] == [read["other"]]
    assert (np.float32(read["other"][0]), read["other"][1:]) == (values[0], [None, None])
    assert b"".join(json_parts({})) == b"{}"


def test_parts_are_no_shorter_than_a_write_and_items_are_encoded_as_they_come():
    item = ["0123456789"] * 1000
    num_items = 500
    tracemalloc.start()
    parts = json_parts({"items": (list(item) for _ in range(num_items))})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_bytes = sum(map(len, parts))
    assert num_bytes > num_items * len(item) * 12
    assert all(len(part) >= PIECE_BYTES for part in parts[:-1])
    assert peak < 1.3 * num_bytes


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
        answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert len(orjson.loads(answer.content)["choices"]) == NUM_PROMPTS
    # All choices as objects at once take 8.8 times the bytes.
    assert 0.2 < growth.num_bytes / len(answer.content) < 2.5
