"""Events and answers of Anthropic's Messages, made of what a worker sends."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.anthropic.answers import whole_answer
from app.anthropic.bodies import MESSAGES_BODY
from app.anthropic.stream import MessageEvents
from app.outputs.json_parts import json_parts
from harness.api_schemas import EVENTS, operation_of, problems
from titopool.errors import GenerationFailed
from titopool.wire.messages import Chunk, Completed, Completion, Logprobs

CONTENT = operation_of("post", "/v1/messages").operation["responses"]["200"]["content"]
EVENT = CONTENT[EVENTS]["schema"]["x-event"]


def turn(**fields: Any) -> Any:
    body = {"messages": [], "max_tokens": 8, "return_token_ids": True, **fields}
    found = MESSAGES_BODY.decode(json.dumps(body).encode())
    found.options.max_tokens = found.fields.max_tokens
    return SimpleNamespace(
        call=SimpleNamespace(
            id="x", facts=SimpleNamespace(max_model_len=6), hold=lambda num_bytes: None
        ), fields=found.fields,
        options=found.options, adapter="", model="m",
        prompt=SimpleNamespace(token_ids=np.array([1, 2], np.int32)),
    )  # fmt: skip


def piece(message: dict[str, Any] | None, reason: str = "", *, stop: Any = None) -> Completion:
    values = Logprobs(np.array([-0.5], np.float32).tobytes())
    ids = np.array([5], np.int32).tobytes()
    return Completion(ids, reason, values, [(3, 0)], stop_reason=stop, message=message)


def called(arguments: str, index: int, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments, "name": name}
    return {"tool_calls": [{"index": index, "id": name and f"id-{name}", "function": function}]}


def streamed(*pieces: Completion) -> list[dict[str, Any]]:
    writer = MessageEvents(turn())
    chunks = [(0, Chunk(1, 1, [(0, one)], num_cached_tokens=1)) for one in pieces]
    events = [*writer.write_chunks(chunks), *writer.write_end()]
    found = [json.loads(b"".join(json_parts(event))) for event in events]
    assert not any(problems(one, EVENT) for one in found), found
    return found


def whole(completion: Completion) -> dict[str, Any]:
    result = Completed(1, 1, [completion], num_cached_tokens=1)
    answer: dict[str, Any] = json.loads(b"".join(whole_answer(turn(), [result])))
    assert not problems(answer, CONTENT["application/json"]["schema"]), answer
    return answer


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks as a client joins them; each ends before the next begins."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            is_open = True
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            delta = event["delta"]
            name = delta["type"].removesuffix("_delta").replace("input_", "")
            blocks[-1][name] += delta.get(name, delta.get("partial_json"))
        elif event["type"] == "content_block_stop":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            is_open = False
    assert not is_open
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    return blocks


def test_a_stream_has_the_blocks_of_the_whole_answer():
    first, second = called('{"a": ', 0, "f"), called("1}", 0)
    events = streamed(
        piece({"reasoning": "h"}), piece({"reasoning": "m", "content": "a"}), piece({}),
        piece({"content": "b", **first}), piece(second), piece(called("{}", 1, "g"), "tool_calls"),
    )  # fmt: skip
    calls = [
        {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": text}}
        for name, text in (("f", '{"a": 1}'), ("g", "{}"))
    ]
    message = {"reasoning": "hm", "content": "ab", "tool_calls": calls}
    answer = whole(piece(message, "tool_calls"))
    assert blocks_of(events) == answer["content"]
    assert [one["type"] for one in answer["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    end = events[-2]
    assert end["delta"]["stop_reason"] == answer["stop_reason"] == "tool_use"
    assert (end["token_ids"], end["prompt_token_ids"]) == ([5] * 6, [1, 2])
    assert (end["token_logprobs"], end["weight_versions"]) == ([-0.5] * 6, [[3, 0]])
    assert answer["usage"] == {
        "input_tokens": 1, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0,
        "output_tokens": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "reason, stop, num_tokens, expected",
    [
        ("stop", None, 1, ("end_turn", None)),
        ("stop", 7, 1, ("end_turn", None)),
        ("stop", "END", 1, ("stop_sequence", "END")),
        ("length", None, 3, ("max_tokens", None)),
        ("length", None, 4, ("model_context_window_exceeded", None)),
        ("repetition", None, 1, ("max_tokens", None)),
        # Clients go on by themselves after `pause_turn`.
        ("abort", None, 1, ("max_tokens", None)),
    ],
)
def test_the_end_has_a_reason(reason: str, stop: Any, num_tokens: int, expected: Any):
    pieces = [piece({"content": "a"}) for _ in range(num_tokens - 1)]
    end = streamed(*pieces, piece({"content": "a"}, reason, stop=stop))[-2]["delta"]
    assert (end["stop_reason"], end["stop_sequence"]) == expected


def test_an_empty_answer_has_an_empty_text():
    empty = [{"type": "text", "text": ""}]
    assert whole(piece(None, "stop"))["content"] == empty
    for events in (streamed(piece({}, "stop")), streamed()):
        assert events[0]["type"] == "message_start"
        assert blocks_of(events) == empty


@pytest.mark.parametrize(
    "arguments, expected",
    [('{"a": 1}', "tool_use"), ('{"a": 1', "stop_sequence"), ("", "stop_sequence")],
)
def test_a_stop_sequence_after_whole_calls_leaves_them_to_be_run(arguments: str, expected: str):
    end = streamed(piece(called(arguments, 0, "f"), "stop", stop="END"))[-2]
    assert end["delta"]["stop_reason"] == expected


# Of which an answer is one level too deep for the encoder.
DEEP = '{"a":' + "[" * 251 + "]" * 251 + "}"
BIG = '{"a": 18446744073709551616}'


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "1", '{"a": 1} x', BIG, DEEP, '{"a": ' + "[" * 300]
)
def test_arguments_that_are_no_object_stand_as_their_text(arguments: str):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (block,) = whole(piece({"tool_calls": [call]}, "tool_calls"))["content"]
    assert block["input"] == {"INVALID_JSON": arguments}
    (block,) = blocks_of(streamed(piece(called(arguments, 0, "f"), "tool_calls")))
    assert block["input"] == {"INVALID_JSON": arguments}


def test_a_text_that_is_not_parsed_says_why():
    message = {"content": "a", "parsing_error": "too slow"}
    assert whole(piece(message, "stop"))["parsing_error"] == "too slow"
    assert streamed(piece(message, "stop"))[-2]["parsing_error"] == "too slow"


def test_a_call_that_goes_on_after_another_part_is_an_error():
    with pytest.raises(GenerationFailed, match="more of call 0"):
        streamed(piece(called("{", 0, "f")), piece({"content": "a"}), piece(called("}", 0)))


def test_an_error_is_an_event_in_anthropics_shape():
    (event,) = MessageEvents(turn()).write_failure(GenerationFailed("lost"), "x")
    assert (event["type"], event["error"]["type"]) == ("error", "api_error")
    assert (event["error"]["code"], event["request_id"]) == ("generation_failed", "x")
