"""Answers of Anthropic's routes, whole and as events of streams, and how a whole one is made."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Literal

import msgspec
import orjson
from flask import Response
from msgspec import UNSET, UnsetType

from app.anthropic.conversation import INVALID_JSON
from app.call.chats import ChatTurn, sampled_fields
from app.call.jobs import expanded_ids
from app.http.responses import json_line
from app.outputs.answer_parts import SampledFields
from app.outputs.json_parts import json_parts
from app.outputs.sampled import Part, Sampled
from app.route.error_schemas import Error
from titopool.wire.messages import Completed

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "model_context_window_exceeded",
]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """A thought. Its signature is the request's id, and nobody checks it."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool. Arguments that are no object of JSON are the text at `INVALID_JSON`."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct, kw_only=True):
    """Numbers of tokens; the prompt has `input_tokens` and those that were read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessageAnswer(SampledFields, kw_only=True):
    """The message that the model has generated."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    # In a stream null until the end.
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(msgspec.Struct, kw_only=True):
    """What a block or the message has gained."""

    type: (
        Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType
    ) = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(SampledFields, kw_only=True):
    """An event of a stream; `message_delta`, the last but one, has the fields of `return_token_ids`."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    message: MessageAnswer | UnsetType = UNSET
    # Of the block.
    index: int | UnsetType = UNSET
    content_block: TextBlock | ThinkingBlock | ToolUseBlock | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(msgspec.Struct, kw_only=True):
    """The number of the prompt's tokens, with those of its images."""

    input_tokens: int


class AnthropicError(Error, kw_only=True):
    """Every error, in Anthropic's shape; the `type` in `error` is Anthropic's, too."""

    type: Literal["error"]
    request_id: str


# ---- how they are made ----------------------------------------------------------------------

ERROR_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
# The text by which harnesses know that a conversation must become shorter.
TOO_LONG = "prompt is too long: "


def error_of(body: dict[str, Any], status: int) -> dict[str, Any]:
    """The body of an error in the server's shape as one in Anthropic's."""
    error = dict(body["error"])
    error["type"] = ERROR_TYPES.get(
        status,
        "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error",
    )
    if error["code"] == "prompt_too_long":
        error["message"] = TOO_LONG + error["message"]
    return {"type": "error", "error": error, "request_id": error.get("request_id", "")}


def in_shape(response: Response) -> Response:
    """Gives an error Anthropic's shape."""
    if response.status_code >= HTTPStatus.BAD_REQUEST and response.is_json:
        body = orjson.loads(response.get_data())
        response.set_data(json_line(error_of(body, response.status_code)))
    return response


def head(turn: ChatTurn) -> dict[str, Any]:
    """The first fields of a message."""
    return {
        "id": f"msg_{turn.call.id}",
        "type": "message",
        "role": "assistant",
        "model": turn.model,
    }


def stop_of(turn: ChatTurn, sampled: Sampled, num_prompt: int) -> tuple[StopReason, str | None]:
    """Why a message ended, and the stop sequence that ended it."""
    calls = [part for part in sampled.parts if part.kind == "call"]
    if sampled.finish_reason in ("stop", "tool_calls"):
        stop = sampled.stop_reason if sampled.finish_reason == "stop" else None
        # A call that a stop sequence has cut must not run.
        if isinstance(stop, str) and not (calls and all(map(_is_whole, calls))):
            return "stop_sequence", stop
        return ("tool_use" if calls else "end_turn"), None
    is_full = num_prompt + sampled.num_tokens >= turn.call.facts.max_model_len
    if is_full and sampled.num_tokens < (turn.options.max_tokens or 0):
        return "model_context_window_exceeded", None
    return "max_tokens", None


def usage_of(num_prompt: int, num_generated: int, num_cached: int) -> dict[str, int]:
    """Anthropic's `usage`, in tokens."""
    return {
        "input_tokens": num_prompt - num_cached,
        "output_tokens": num_generated,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
    }


def block_of(turn: ChatTurn, part: Part) -> dict[str, Any]:
    """A part as a block; of a stream that has just begun, an empty one."""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": turn.call.id}
    if part.kind == "content":
        return {"type": "text", "text": part.text}
    name = part.call_id or f"call_{turn.call.id}_{part.number}"
    return {"type": "tool_use", "id": name, "name": part.name, "input": input_of(part)}


def input_of(part: Part) -> dict[str, Any]:
    """The arguments of a call; what is no object of JSON is the text at `INVALID_JSON`."""
    found = _object_of(part.text)
    return {INVALID_JSON: part.text} if found is None else found


def _is_whole(call: Part) -> bool:
    return bool(call.text) and _object_of(call.text) is not None


def _object_of(arguments: str) -> dict[str, Any] | None:
    """The object that a call's arguments are in JSON; "" is an empty one. None: they are none that can
    be written again."""
    try:
        found = msgspec.json.decode(arguments or "{}")
        # As deep as it stands in an answer.
        orjson.dumps([[[[found]]]])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def whole_answer(turn: ChatTurn, results: list[Completed]) -> Iterator[bytes]:
    """The response body of a request that is not streamed, as JSON in parts."""
    (ids,), (result,), sampled = expanded_ids([turn.prompt], results), results, Sampled()
    sampled.add(result.completions[0])
    stop_reason, stop_sequence = stop_of(turn, sampled, len(ids))
    answer = head(turn) | {
        "content": [block_of(turn, part) for part in sampled.parts or [Part("content")]],
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage_of(len(ids), sampled.num_tokens, result.num_cached_tokens),
    }
    return json_parts(answer | sampled_fields(turn, sampled, ids, result.adapter_version))
