"""The MessagePack response of /generate/ equals the JSON response bit for bit, in fewer bytes."""

import math
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from app.outputs.token_arrays import binary_reply, is_binary, json_reply
from benchmarks.targets import Titopool
from harness.servers import Server
from tests.conftest import StartStub
from titopool.wire.messages import Completed, Completion, Logprobs

BINARY = {"Accept": "application/msgpack"}
PROMPT = [42, 1393, 14, 535, 78, 70]
NAN, INFINITY = float("nan"), float("inf")


def int32(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def float32(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def bits(value: float | None) -> str | None:
    """A float32 to compare: -0.0 and 0.0 differ; None for a value that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(np.float32(value)).hex()


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """A JSON response with its log-probabilities as `bits`."""
    values = answer["logprobs"]
    if values is not None:
        values = [[[bits(value) for value in entries] for entries in one] for one in values]
    return {**answer, "logprobs": values}


def nested(encoded: bytes, sent: list[Any]) -> dict[str, Any]:
    """A binary response in the shape of the JSON one, decoded as docs/http.md describes."""
    answer = msgspec.msgpack.decode(encoded)
    ids = [np.frombuffer(one, "<i4").tolist() for one in answer["completion_ids"]]
    counts = counts_of(answer.pop("num_logprobs"), ids)
    entry_ids, values = answer["logprob_token_ids"], answer["logprobs"]
    if values is not None:
        flat = [np.frombuffer(one, "<f4") for one in values]
        values = [split(one, some) for one, some in zip(flat, counts, strict=True)]
        entry_ids = [
            split(sampled if one is None else np.frombuffer(one, "<i4"), some)
            for one, sampled, some in zip(entry_ids or [None] * len(ids), ids, counts, strict=True)
        ]
    prompt_ids = [
        given if one is None else np.frombuffer(one, "<i4").tolist()
        for one, given in zip(answer["prompt_ids"], sent, strict=True)
    ]
    arrays = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprob_token_ids": entry_ids}
    return comparable({**answer, **arrays, "logprobs": values})


def counts_of(bins: list[bytes | None] | None, ids: list[list[int]]) -> list[list[int]]:
    return [
        [1] * len(sampled) if one is None else np.frombuffer(one, "<i4").tolist()
        for one, sampled in zip(bins or [None] * len(ids), ids, strict=True)
    ]


def split(flat: Any, counts: list[int]) -> list[list[Any]]:
    numbers = iter(list(flat))
    return [[next(numbers) for _ in range(count)] for count in counts]


@pytest.mark.parametrize(
    "prompts, options",
    [
        pytest.param([PROMPT], {}, id="ids"),
        pytest.param([PROMPT], {"logprobs": 1, "temperature": 0}, id="the-best-is-the-sampled"),
        pytest.param([PROMPT], {"logprobs": 3, "n": 2}, id="3-logprobs"),
        pytest.param([PROMPT], {"logprobs": 3, "top_k": 2}, id="not-finite"),
        pytest.param([PROMPT], {"logprobs": None}, id="no-logprobs"),
        pytest.param(
            [PROMPT], {"generation_kwargs": {"seed": 5, "logprob_token_ids": [3, 900]}}, id="chosen"
        ),
        pytest.param([PROMPT], {"truncate_prompt_tokens": 2}, id="cut"),
        pytest.param([PROMPT], {"truncate_prompt_tokens": 9}, id="short-enough"),
        pytest.param(["Hello, world"], {}, id="text"),
        pytest.param(
            [{"prompt_token_ids": PROMPT}], {"truncate_prompt_tokens": -1}, id="TokensPrompt"
        ),
    ],
)
def test_binary_and_json_answers_are_equal(server: Server, prompts, options):
    body = {"prompts": prompts, "max_tokens": 12, "generation_kwargs": {"seed": 5}, **options}
    answer = server.generate(**body)
    binary = server.post("/generate/", body, headers=BINARY)
    assert binary.headers["Content-Type"] == "application/msgpack"
    sent = [one["prompt_token_ids"] if isinstance(one, dict) else one for one in prompts]
    assert nested(binary.content, sent) == comparable(answer)
    # The response has prompt ids only where the client cannot know them.
    is_changed = answer["prompt_ids"] != sent
    assert (msgspec.msgpack.decode(binary.content)["prompt_ids"] != [None]) == is_changed


def test_errors_are_json_for_binary_clients(server: Server):
    answer = server.post("/generate/", {"prompts": []}, headers=BINARY)
    assert answer.status_code == 400
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json()["error"]["param"] == "prompts"


@pytest.mark.parametrize(
    "header, expected",
    [
        ("", False),
        ("*/*", False),
        ("application/*", False),
        ("application/json", False),
        ("application/msgpack", True),
        ("Application/MsgPack", True),
        ("application/x-msgpack", True),
        ("application/msgpack, */*", True),
        ("application/json;q=0.5, application/msgpack", True),
        ("application/json, application/msgpack;q=0.5", False),
        ("application/msgpack, application/json", False),
        ("application/msgpack;q=0.1, */*", False),
        ("application/msgpack;q=0, */*", False),
        ("application/json;q=0, */*", True),
        ("text/html", False),
        ("text/html;q=x,;,application", False),
    ],
)
def test_accept_header_selects_the_format(header: str, expected: bool):
    assert is_binary(header) == expected


COMPLETIONS = {
    "sampled": Completion(int32(7, 8), "stop", Logprobs(float32(-0.1, NAN)), [(0, 0)]),
    "other ids": Completion(int32(7, 8), "stop", Logprobs(float32(-1, -2), int32(3, 3)), [(0, 0)]),
    "two and one": Completion(
        int32(7, 8),
        "length",
        Logprobs(float32(-0.0, -INFINITY, -3.3), int32(7, 9, 8), int32(2, 1)),
        [(0, 0), (1, 1)],
    ),
    "no tokens": Completion(b"", "stop", Logprobs(b""), [(0, 0)]),
    "none": Completion(b"", "stop", None, [(0, 0)]),
}


def test_json_and_binary_replies_agree_on_mixed_completions():
    completions = list(COMPLETIONS.values())
    results = [Completed(1, 1, completions[:2], 3), Completed(2, 1, completions[2:], 0)]
    ids = [np.arange(3, dtype=np.int32), np.arange(9, dtype=np.int32)[-4:]]
    binary = b"".join(binary_reply([None, ids[1]], results[:], with_logprobs=True))
    as_json = orjson.loads(b"".join(json_reply(ids, results, with_logprobs=True)))
    assert results == []
    assert nested(binary, [[0, 1, 2], "text"]) == comparable(as_json)


def test_arrays_that_repeat_the_completion_are_nil():
    def reply(*names: str, with_logprobs: bool = True) -> dict[str, Any]:
        result = Completed(1, 1, [COMPLETIONS[name] for name in names], 0)
        parts = binary_reply([None], [result], with_logprobs=with_logprobs)
        return msgspec.msgpack.decode(b"".join(parts))

    mixed = reply("sampled", "other ids", "two and one")
    assert mixed["logprob_token_ids"] == [None, int32(3, 3), int32(7, 9, 8)]
    assert mixed["num_logprobs"] == [None, None, int32(2, 1)]
    # NaN and infinities pass unchanged.
    assert mixed["logprobs"][0] == float32(-0.1, NAN)
    assert mixed["logprobs"][2] == float32(-0.0, -INFINITY, -3.3)
    sampled = reply("sampled", "no tokens", "none")
    assert sampled["logprobs"] == [float32(-0.1, NAN), b"", b""]
    assert (sampled["logprob_token_ids"], sampled["num_logprobs"]) == (None, None)
    assert reply("sampled", with_logprobs=False)["logprobs"] is None


def test_256_ids_in_and_out_take_12_bytes_a_token_at_most(stub_server, start_stub: StartStub):
    start_stub(0)
    server = stub_server(1)
    prompt = list(range(1, 257))
    answer = server.post("/generate/", {"prompts": [prompt], "max_tokens": 256}, headers=BINARY)
    assert Titopool(1, binary=True).lengths(answer.content) == [256]
    assert nested(answer.content, [prompt])["completion_ids"] == [prompt[::-1]]
    print(f"{len(answer.content) / 256:.2f} bytes a token")
    assert len(answer.content) <= 12 * 256
