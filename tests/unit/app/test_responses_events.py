"""Events and answers of the Responses API, made of what a worker sends."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.outputs.json_parts import json_parts
from app.responses.answers import ResponsesRequest, whole_answer
from app.responses.bodies import RESPONSES_BODY
from app.responses.stream import ResponseEvents
from harness.api_schemas import EVENTS, operation_of, problems
from titopool.errors import GenerationFailed
from titopool.wire.messages import Chunk, Completed, Completion

OPENAIS = TypeAdapter(ResponseStreamEvent)
CONTENT = operation_of("post", "/v1/responses").operation["responses"]["200"]["content"]
EVENT = CONTENT[EVENTS]["schema"]["x-event"]
CALL = {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}


def request(**fields: Any) -> ResponsesRequest:
    body = json.dumps({"input": "a", **fields}).encode()
    found = RESPONSES_BODY.decode(body)
    turn: Any = SimpleNamespace(
        call=SimpleNamespace(id="x", hold=lambda num_bytes: None), fields=found.fields, options=found.options, adapter="",
        model="m", prompt=SimpleNamespace(token_ids=np.array([1, 2], np.int32)),
    )  # fmt: skip
    return ResponsesRequest(turn, found.fields, None)


def piece(message: dict[str, Any] | None, finish_reason: str = "", text: str = "") -> Completion:
    ids = np.array([5], np.int32).tobytes()
    return Completion(ids, finish_reason, None, [(0, 0)], text=text, message=message)


def chunks(*pieces: Completion) -> list[tuple[int, Chunk]]:
    return [(0, Chunk(1, 1, [(0, one)], num_cached_tokens=1)) for one in pieces]


def called(arguments: str, index: int = 0) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def checked(events: Any) -> list[dict[str, Any]]:
    """The events as a client gets them; each is OpenAI's, and fits the description."""
    found = [json.loads(b"".join(json_parts(event))) for event in events]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    for one in found:
        assert not problems(one, EVENT), one
        if one["type"] != "response.failed":
            OPENAIS.validate_python(one)
    return found


def streamed(*pieces: Completion, **fields: Any) -> list[dict[str, Any]]:
    writer = ResponseEvents(request(**fields))

    def events() -> Any:
        yield from writer.write_chunks(chunks(*pieces))
        yield from writer.write_end()

    return checked(events())


def whole(completion: Completion, **fields: Any) -> dict[str, Any]:
    result = Completed(1, 1, [completion], num_cached_tokens=1)
    answer: dict[str, Any] = json.loads(b"".join(whole_answer(request(**fields), [result])))
    assert not problems(answer, CONTENT["application/json"]["schema"]), answer
    Response.model_validate(answer)
    return answer


TURN = {
    "reasoning": "hm", "content": "ab", "tool_calls": [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "1"}},
    ],
}  # fmt: skip


def test_a_stream_ends_with_the_whole_answer():
    events = streamed(
        piece({"reasoning": "h"}), piece({"reasoning": "m"}), piece({"content": "a"}), piece({}),
        piece({"content": "b", "tool_calls": [CALL]}), piece(called("{}")),
        piece({"tool_calls": [{"index": 1, "id": "c1", "function": {"name": "g", "arguments": "1"}}]}),
        piece({}, "tool_calls"),
        metadata={"a": "b"}, return_token_ids=True,
    )  # fmt: skip
    expected = whole(piece(TURN, "tool_calls"), metadata={"a": "b"}, return_token_ids=True)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert last["output"] == expected["output"]
    assert [one["id"] for one in last["output"]] == ["rs_x_0", "msg_x_1", "fc_x_2", "fc_x_3"]
    assert last["token_ids"] == [5] * 8
    assert last["usage"]["output_tokens"] == 8
    assert last["metadata"] == expected["metadata"] == {"a": "b"}
    names = [one["type"].removeprefix("response.") for one in events]
    part = ["content_part.added", "reasoning_text.delta", "reasoning_text.delta",
            "reasoning_text.done", "content_part.done"]  # fmt: skip
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]  # fmt: skip
    assert names == [
        "created", "in_progress", "output_item.added", *part, "output_item.done",
        "output_item.added", *(one.replace("reasoning", "output") for one in part), "output_item.done",
        *call, *call, "completed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "reason, status, details, item",
    [
        ("stop", "completed", None, "completed"),
        ("length", "incomplete", {"reason": "max_output_tokens"}, "incomplete"),
        ("repetition", "incomplete", {"reason": "max_output_tokens"}, "incomplete"),
        ("abort", "cancelled", None, "incomplete"),
    ],
)
def test_the_end_has_a_status(reason, status, details, item):
    answer = whole(piece(None, reason, "a"))
    *_, last = streamed(piece(None, "", "a"), piece(None, reason))
    assert last["type"] == (
        "response.completed" if status == "completed" else "response.incomplete"
    )
    for one in (answer, last["response"]):
        assert (one["status"], one["incomplete_details"]) == (status, details)
        assert one["output"][-1]["status"] == item


def test_an_empty_text_is_a_message():
    for output in (
        whole(piece({"content": None}, "stop"))["output"],
        streamed(piece({}, "stop"))[-1]["response"]["output"],
        # A job that was aborted before it began.
        streamed()[-1]["response"]["output"],
    ):
        assert [one["content"][0]["text"] for one in output] == [""]


def test_text_that_is_not_parsed_says_why():
    message = {"content": "a", "parsing_error": "too slow"}
    for answer in (
        whole(piece(message, "stop")),
        streamed(piece({"content": "b"}), piece(message, "stop"))[-1]["response"],
    ):
        assert answer["parsing_error"] == "too slow"


@pytest.mark.parametrize("begun", [0, 2])
def test_an_error_is_the_end_of_the_response(begun: int):
    writer = ResponseEvents(request())
    pieces = [piece(None, "", "a")] * begun

    def events() -> Any:
        yield from writer.write_chunks(chunks(*pieces))
        yield from writer.write_failure(GenerationFailed("the worker was lost"), "x")

    *others, last = checked(events())
    assert others[0]["type"] == "response.created"
    assert last["type"] == "response.failed"
    response = last["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "generation_failed"
    assert response["error"]["message"] == "the worker was lost"
    assert [one["content"][0]["text"] for one in response["output"]] == ["aa"] * bool(begun)
