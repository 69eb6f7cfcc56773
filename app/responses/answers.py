"""The `response` object of the Responses API, whole and as events of a stream, and how it is made.

Follows `openai.types.responses.Response` and its `ResponseStreamEvent`.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from app.call import openai_logprobs
from app.call.chats import ChatTurn, sampled_fields
from app.call.jobs import expanded_ids
from app.call.token_texts import MAX_BEFORE, TokenTexts
from app.outputs.answer_parts import ChatToken, SampledFields
from app.outputs.json_parts import json_parts
from app.outputs.sampled import Part, Sampled
from app.responses.bodies import TOOL_FIELDS, ResponsesFields
from app.route.error_schemas import ErrorDetail
from titopool.wire.messages import Completed, Completion

ItemStatus = Literal["in_progress", "completed", "incomplete"]
# OpenAI's status and `incomplete_details`, by the finish_reason of a completion; others are complete.
_CUT = ("incomplete", {"reason": "max_output_tokens"})
ENDS: dict[str, tuple[str, dict[str, str] | None]] = {
    "length": _CUT, "repetition": _CUT, "abort": ("cancelled", None)
}  # fmt: skip
# The type of an item and the prefix of its id, by the kind of part.
# Of a response's id, before the request's.
PREFIX = "resp_"
TYPES = {
    "reasoning": ("reasoning", "rs"), "content": ("message", "msg"), "call": ("function_call", "fc")
}  # fmt: skip


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    """A text for the user."""

    text: str
    # Always empty.
    annotations: list[dict[str, Any]]
    # Of all sampled tokens, those of reasoning and calls too.
    logprobs: list[ChatToken]


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    """What the model thought."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """The model's reasoning, as vLLM's parser found it."""

    id: str
    status: ItemStatus
    # Always empty.
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class OutputMessage(msgspec.Struct, kw_only=True, tag="message"):
    """What the model wrote for the user."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A call of a function, which the client runs; `arguments` is JSON text."""

    id: str
    status: ItemStatus
    # Names the call in its `function_call_output`.
    call_id: str
    name: str
    arguments: str


OutputItem = ReasoningItem | OutputMessage | FunctionCallItem


class InputTokens(msgspec.Struct, kw_only=True):
    """Of the prompt, in tokens."""

    cached_tokens: int
    # Always 0: the prefix cache takes all prompts, and none costs more.
    cache_write_tokens: int


class OutputTokens(msgspec.Struct, kw_only=True):
    """Of the completion, in tokens."""

    # Always 0: parsers find texts, not the tokens that they came from.
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why the model did not end its answer."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(SampledFields, kw_only=True):
    """The answer, with the fields of the body that made it."""

    id: str
    object: Literal["response"]
    # Seconds since 1970.
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    incomplete_details: IncompleteDetails | None
    # Of a stream that failed.
    error: ErrorDetail | None
    model: str
    output: list[OutputItem]
    # Null until the end of a stream.
    usage: ResponseUsage | None
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    # Always these: no prompt is shortened, and no response is kept by its id alone.
    truncation: Literal["disabled"]
    background: bool
    store: bool
    previous_response_id: str | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream; which fields it has depends on its type."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete",
        "response.failed", "response.output_item.added", "response.output_item.done",
        "response.content_part.added", "response.content_part.done",
        "response.output_text.delta", "response.output_text.done",
        "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
    ]  # fmt: skip
    # From 0.
    sequence_number: int
    response: ResponseAnswer | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    # In a delta, of the tokens since the last one.
    logprobs: list[ChatToken] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


# ---- how they are made ----------------------------------------------------------------------


class ResponsesRequest(NamedTuple):
    """A checked request."""

    turn: ChatTurn
    fields: ResponsesFields
    # None: the client requests no log-probabilities.
    texts: TokenTexts | None

    def head(self) -> dict[str, Any]:
        """A response that has begun."""
        fields, options, turn = self.fields, self.turn.options, self.turn
        choice = fields.tool_choice
        return {
            "id": PREFIX + turn.call.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "incomplete_details": None,
            "error": None,
            "model": turn.model,
            "output": [],
            "usage": None,
            "instructions": fields.instructions,
            "tools": [
                {name: one.get(name) for name in ("type", *TOOL_FIELDS)} for one in fields.tools
            ],
            "tool_choice": choice
            if isinstance(choice, str)
            else {"type": "function", "name": choice["name"]},
            "parallel_tool_calls": fields.parallel_tool_calls,
            "max_output_tokens": fields.max_output_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_logprobs": fields.top_logprobs,
            "text": {"format": msgspec.to_builtins(fields.text.format), "verbosity": "medium"},
            "reasoning": {"effort": fields.reasoning.effort, "summary": None},
            "metadata": fields.metadata,
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": fields.previous_response_id,
        }

    def item_id(self, index: int, part: Part) -> str:
        """The id of an item of the output."""
        return f"{TYPES[part.kind][1]}_{self.turn.call.id}_{index}"

    def item(self, index: int, part: Part, status: ItemStatus) -> dict[str, Any]:
        """An item of the output without log-probabilities, empty while it is in progress."""
        item: dict[str, Any] = {"id": self.item_id(index, part), "type": TYPES[part.kind][0]}
        item["status"], has_begun = status, status == "in_progress"
        if part.kind == "call":
            arguments = "" if has_begun else part.text
            call_id = part.call_id or f"call_{self.turn.call.id}_{index}"
            return item | {"call_id": call_id, "name": part.name, "arguments": arguments}
        item |= {"summary": list[Any]()} if part.kind == "reasoning" else {"role": "assistant"}
        return item | {"content": [] if has_begun else [content_of(part)]}

    def output(
        self, parts: Iterable[tuple[Part, ItemStatus]], pieces: Sequence[Completion]
    ) -> Iterator[dict[str, Any]]:
        """All items; the first text has the log-probabilities of `pieces`, if the client requests them."""
        has_logprobs = self.texts is None
        for index, (part, status) in enumerate(parts):
            item = self.item(index, part, status)
            if part.kind == "content" and not has_logprobs:
                has_logprobs = True
                (content,) = item["content"]
                # An iterator, because it has a list of unknown length (`json_parts`).
                item["content"] = iter([content | {"logprobs": self.logprobs(pieces, [])}])
            yield item

    def end(
        self, sampled: Sampled, ids: np.ndarray, num_cached: int, adapter_version: int | None
    ) -> dict[str, Any]:
        """The fields of a response that its end changes, without `output`; `ids`: the prompt's."""
        status, details = ENDS.get(sampled.finish_reason, ("completed", None))
        return {
            "status": status,
            "incomplete_details": details,
            "usage": {
                "input_tokens": len(ids),
                "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
                "output_tokens": sampled.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(ids) + sampled.num_tokens,
            },
            **sampled_fields(self.turn, sampled, ids, adapter_version),
        }

    def logprobs(self, pieces: Sequence[Completion], before: list[int]) -> Iterator[Any]:
        """Of the tokens of `pieces`, in order; none if the client requests none.

        Args:
            before: the completion's last ids before the pieces, at most `MAX_BEFORE`.
        """
        if self.texts is not None:
            for piece in pieces:
                k = self.fields.top_logprobs
                yield from openai_logprobs.of_chat(piece, self.texts, k, before)["content"]
                before = last_ids(before, piece)


def last_ids(before: list[int], piece: Completion) -> list[int]:
    """The ids that the text of the tokens after `piece` may depend on."""
    return [*before, *np.frombuffer(piece.token_ids, np.int32)[-MAX_BEFORE:].tolist()][-MAX_BEFORE:]


def content_of(part: Part) -> dict[str, Any]:
    """The only entry of an item's `content`, without log-probabilities."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def item_status(finish_reason: str) -> ItemStatus:
    """Of the last item."""
    return "incomplete" if finish_reason in ENDS else "completed"


def whole_answer(request: ResponsesRequest, results: list[Completed]) -> Iterator[bytes]:
    """The response body of a request that is not streamed, as JSON in parts."""
    (ids,), (result,) = expanded_ids([request.turn.prompt], results), results
    sampled, (completion,) = Sampled(), result.completions
    sampled.add(completion)
    end = request.end(sampled, ids, result.num_cached_tokens, result.adapter_version)
    parts, last = sampled.parts or [Part("content")], item_status(completion.finish_reason)
    items = ((part, last if part is parts[-1] else "completed") for part in parts)
    output = request.output(items, [completion])
    return json_parts(request.head() | end | {"output": output})
