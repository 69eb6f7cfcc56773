"""Long lists of a body are decoded in pieces: to the same values and errors, while others run."""

import itertools
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gevent
import msgspec
import numpy as np
import pytest

from app.generate import GENERATE_BODY
from app.openai import bodies as openai
from app.responses.bodies import RESPONSES_BODY
from app.route import decoding, long_lists
from app.route.decoding import decode_body
from app.trl import bodies as generation
from app.vllm import bodies as inference
from app.weights import bodies as weights
from titopool.errors import InvalidRequest

MIB = 2**20
ROW = list(range(100_000, 103_000))
ROWS = [ROW] * 100
FLAT = ROW * 100
MESSAGES = [{"role": "user", "content": "x" * 30}] * 20_000
PARTS = [{"type": "text", "text": "a,[b]"}] * 40_000
BEGIN_BODY = msgspec.json.Decoder(weights.BeginBody)
NAMES = {"session": "a", "dtypes": ["int8"], "shapes": [[1]], "names": ["a"]}
# Name: decoder, body. All are longer than `decoding.LONG_BYTES`.
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompts": (GENERATE_BODY, {"prompts": ROWS, "n": 2}),
    "objects": (
        GENERATE_BODY,
        {"prompts": [{"prompt_token_ids": ROW, "cache_salt": "a"}] * 100},
    ),
    "an empty prompt": (GENERATE_BODY, {"prompts": [[], *ROWS]}),
    "a long prompt": (GENERATE_BODY, {"prompts": [[1], FLAT, [2]]}),
    "a long object": (
        GENERATE_BODY,
        {"prompts": [{"prompt_token_ids": [1]}, {"prompt_token_ids": FLAT, "cache_salt": "a"}]},
    ),
    "images": (
        GENERATE_BODY,
        {"prompts": [[1]] * 9, "images": [None, *[["x" * 200_000]] * 8]},
    ),
    "sequences": (generation.SEQUENCES_BODY, {"sequences": ROWS, "prompt_lengths": [1] * 100}),
    "one list": (inference.GENERATE_BODY, {"token_ids": FLAT, "sampling_params": {"n": 2}}),
    "prompt": (openai.COMPLETIONS_BODY, {"prompt": ROWS, "echo": True}),
    "one prompt": (openai.COMPLETIONS_BODY, {"prompt": FLAT}),
    "input_ids": (GENERATE_BODY, {"input_ids": ROWS, "rid": "a"}),
    "one list of input_ids": (GENERATE_BODY, {"input_ids": FLAT}),
    "input_ids with others": (GENERATE_BODY, {"input_ids": [*FLAT, [1, 2], "3,4", 2.5]}),
    "texts": (openai.COMPLETIONS_BODY, {"prompt": ["a,[b]"] * 200_000}),
    "escapes": (GENERATE_BODY, {"prompts": ['","', "\\", '\\"', "", "\n\u20ac]"] * 60_000}),
    "long texts": (GENERATE_BODY, {"prompts": ['a, b"' * 50_000] * 9}),
    "texts, then others": (GENERATE_BODY, {"prompts": ["a,"] * 50_000 + ROWS + ["b"]}),
    "names": (BEGIN_BODY, NAMES | {"names": ["a.b"] * 260_000}),
    "conversations": (generation.CHAT_BODY, {"messages": [MESSAGES[:1]] * 20_000}),
    "messages": (openai.CHAT_COMPLETIONS_BODY, {"messages": MESSAGES, "n": 3}),
    "parts": (openai.CHAT_COMPLETIONS_BODY, {"messages": [{"role": "user", "content": PARTS}]}),
    "items": (RESPONSES_BODY, {"input": MESSAGES, "top_k": 3, "new_field": 1}),
    "one conversation": (generation.CHAT_BODY, {"messages": [MESSAGES, MESSAGES[:1]]}),
    "parts of a conversation": (
        generation.CHAT_BODY,
        {"messages": [[{"role": "user", "content": PARTS, "name": "a"}], MESSAGES[:2]]},
    ),
    "one list of input_ids in a list": (GENERATE_BODY, {"input_ids": [FLAT, [1, 2]]}),
    "images of one prompt": (
        GENERATE_BODY,
        {"prompts": [[1]], "images": [["a,b"] * 200_000]},
    ),
    "logprobs": (generation.MISMATCH_BODY, {"request_id": "a", "logprobs": [[-1.5] * 300_000]}),
    "lists of lists": (GENERATE_BODY, {"input_ids": [[[[[[[FLAT]]]]]]]}),
    "tokens": (inference.DETOKENIZE_BODY, {"tokens": FLAT}),
    "bad: id": (GENERATE_BODY, {"prompts": [*ROWS, [1, 2.5]]}),
    "bad: id of a long prompt": (GENERATE_BODY, {"prompts": [[1], [*FLAT, "1"]]}),
    "bad: id of a long object": (
        GENERATE_BODY,
        {"prompts": [{"prompt_token_ids": [*FLAT, None]}]},
    ),
    "bad: field of a long object": (
        GENERATE_BODY,
        {"prompts": [{"prompt_token_ids": FLAT, "salt": "a"}]},
    ),
    "bad: nested in a long prompt": (GENERATE_BODY, {"prompts": [[*FLAT, [1]]]}),
    "bad: prompt": (GENERATE_BODY, {"prompts": [*ROWS, 3]}),
    "bad: object": (GENERATE_BODY, {"prompts": [*ROWS, {"prompt_ids": []}]}),
    "bad: first": (GENERATE_BODY, {"prompts": [True, *ROWS]}),
    "bad: too many names": (BEGIN_BODY, NAMES | {"names": ["a.b"] * 270_000}),
    "bad: too many shapes": (BEGIN_BODY, NAMES | {"shapes": [[1, 2]] * 270_000}),
    "bad: name": (BEGIN_BODY, NAMES | {"names": ["a.b"] * 250_000 + ["a" * 1025]}),
    "bad: after texts": (GENERATE_BODY, {"prompts": ["a,"] * 300_000 + [3]}),
    "bad: text": (GENERATE_BODY, {"prompts": ["a,"] * 300_000 + [{"prompt": 3}, "b"]}),
    "bad: field": (GENERATE_BODY, {"prompts": ROWS, "max_token": 3}),
    "bad: other field": (GENERATE_BODY, {"prompts": ROWS, "n": "3"}),
    "bad: number": (inference.GENERATE_BODY, {"token_ids": [*FLAT, "1"], "sampling_params": {}}),
    "bad: nested": (openai.COMPLETIONS_BODY, {"prompt": [*ROWS, [1, {}]]}),
    "bad: message": (openai.CHAT_COMPLETIONS_BODY, {"messages": [*MESSAGES, 3]}),
    "bad: item": (RESPONSES_BODY, {"input": [*MESSAGES, 3]}),
    "bad: part's message": (generation.CHAT_BODY, {"messages": [[*MESSAGES, 3]]}),
    "bad: one list of logprobs": (
        generation.MISMATCH_BODY,
        {"request_id": "a", "logprobs": [[1], [*FLAT, "1"]]},
    ),
    "bad: one shape": (BEGIN_BODY, NAMES | {"shapes": [[1], FLAT]}),
    "bad: no object": (GENERATE_BODY, {"prompts": ROWS, "mm_processor_kwargs": 1}),
}


@pytest.fixture
def in_one_piece(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, Any], Any]:
    def decode(body: bytes, decoder: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "LONG_BYTES", len(body))
            patch.setattr(long_lists, "LONG_BYTES", len(body))
            return outcome(body, decoder)

    return decode


class Refusal(NamedTuple):
    message: str
    param: str | None


def outcome(body: bytes, decoder: Any) -> Any:
    """What a body decodes to, or why it is refused."""
    try:
        return plain(decode_body(body, decoder))
    except InvalidRequest as error:
        return Refusal(error.message, error.param)


def plain(value: Any) -> Any:
    """`value` with lists for arrays and dicts for structs."""
    return msgspec.to_builtins(value, enc_hook=lambda array: array.tolist())


@pytest.mark.parametrize("name", BODIES)
def test_pieces_make_what_the_whole_makes(name: str, in_one_piece: Callable[[bytes, Any], Any]):
    decoder, fields = BODIES[name]
    # Clients may indent.
    for body in (msgspec.json.encode(fields), msgspec.json.format(msgspec.json.encode(fields))):
        assert len(body) > decoding.LONG_BYTES
        whole = in_one_piece(body, decoder)
        assert outcome(bytearray(body), decoder) == whole
        assert isinstance(whole, Refusal) == name.startswith("bad")


@pytest.mark.parametrize(
    ("decoder", "body"),
    [
        (GENERATE_BODY, b'{"input_ids": [[],' + b"1," * MIB + b"1]}"),
        (GENERATE_BODY, b'{"input_ids": ["a",' + b"1," * MIB + b"1]}"),
        (GENERATE_BODY, b'{"prompts": [[1],' + b"1," * MIB + b"1]}"),
        (GENERATE_BODY, b'{"prompts": ["a",' + b"1," * MIB + b"1]}"),
        (openai.CHAT_COMPLETIONS_BODY, b'{"messages": [], "chat_template_kwargs": {"a": ['
         + b"1," * MIB + b"1]}}"),
        (GENERATE_BODY, b'{"input_ids": [1], "sampling_params": {"a": ['
         + b"1," * MIB + b"1]}}"),
    ],
)  # fmt: skip
def test_what_is_not_taken_apart_is_limited(decoder: Any, body: bytes):
    """msgspec would make a million numbers, or of elements, without a pause."""
    began_s = time.thread_time()
    refusal = outcome(body, decoder)
    assert re.search("length <= 262144|at most 262144 commas|expected `str", refusal.message), (
        refusal
    )
    # Where it pauses.
    assert time.thread_time() - began_s < 2


@pytest.mark.parametrize("name", ["null", "true", "{}"])
def test_lists_of_the_wrong_kind_are_refused(name: str):
    body = b'{"prompts": [' + f"{name},".encode() * MIB + b"1]}"
    assert outcome(body, GENERATE_BODY).param == "prompts"


def test_ids_become_arrays_unless_they_do_not_fit():
    rows = [*ROWS, [2**40]]
    body = decode_body(msgspec.json.encode({"prompts": rows}), GENERATE_BODY)
    assert all(isinstance(row, np.ndarray) for row in body.prompts[:-1])
    # The check of the vocabulary refuses it, with its location.
    assert body.prompts[-1] == [2**40]


def test_a_list_with_other_values_between_its_numbers_is_refused():
    # The comma in a text looks like the end of a piece.
    body = msgspec.json.encode({"tokens": [*FLAT, *["1,2"] * 200_000]})
    message, param = outcome(body, inference.DETOKENIZE_BODY)
    assert (message.partition(":")[0], param) in {
        ("tokens", "tokens"),
        ("tokens[300000]", "tokens"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "prompts",
        "objects",
        "one list",
        "prompt",
        "a long prompt",
        "a long object",
        "conversations",
        "input_ids",
        "texts",
    ],
)
def test_other_requests_run_while_a_body_is_decoded(name: str):
    decoder, fields = BODIES[name]
    first, value = next(iter(fields.items()))
    # A decoder that does not pause lets them run twice, before and after.
    assert len(pauses_while_decoding(decoder, fields | {first: 8 * value})) > 5


LONG_ELEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "parts": (
        openai.CHAT_COMPLETIONS_BODY,
        {"messages": [{"role": "user", "content": 5 * PARTS}]},
    ),
    "conversation": (generation.CHAT_BODY, {"messages": [8 * MESSAGES]}),
    "ids": (GENERATE_BODY, {"input_ids": [8 * FLAT, [1]]}),
    "logprobs": (generation.MISMATCH_BODY, {"request_id": "a", "logprobs": [8 * FLAT, [1]]}),
}


@pytest.mark.parametrize("name", LONG_ELEMENTS)
def test_other_requests_run_while_one_long_element_is_decoded(name: str):
    pauses_s = pauses_while_decoding(*LONG_ELEMENTS[name])
    print(name, len(pauses_s), max(pauses_s), sum(pauses_s))
    assert max(pauses_s) < sum(pauses_s) / 4


def pauses_while_decoding(decoder: Any, fields: dict[str, Any]) -> list[float]:
    """CPU time of this process between two turns of another greenlet, in seconds."""
    ends_s: list[float] = []

    def count() -> None:
        while True:
            ends_s.append(time.process_time())
            gevent.sleep(0.0001)

    body = msgspec.json.encode(fields)
    counter = gevent.spawn(count)
    gevent.sleep(0.01)
    ends_s[:] = [time.process_time()]
    decode_body(body, decoder)
    gevent.sleep(0.001)
    counter.kill()
    return [end_s - begin_s for begin_s, end_s in itertools.pairwise(ends_s)]
