"""Answers of OpenAI's routes, whole and as events of streams, and how a whole one is made."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from app.call import openai_logprobs
from app.call.call import Call
from app.call.jobs import Prompt, expanded_ids
from app.call.token_texts import MAX_BEFORE, TokenTexts
from app.openai.bodies import CompletionsFields
from app.outputs.answer_parts import ChatToken, PromptLogprobs, Usage, WeightSpan
from app.outputs.json_parts import Rows, json_parts
from app.outputs.token_arrays import given_up, prompt_rows, weight_spans
from app.outputs.usage import usage
from app.route.fields import ChatFields
from titopool.answers.generation import VersionSpan
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import ChatParsing, Completed, Completion

FinishReason = Literal["stop", "length", "repetition", "abort", "tool_calls"]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a choice of /v1/completions, by token."""

    tokens: list[str]
    # With `echo`, null at the prompt's first token.
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a choice of a chat, by token."""

    content: list[ChatToken]


class Choice(msgspec.Struct, kw_only=True):
    """What choices of both routes have."""

    index: int
    finish_reason: FinishReason | None
    # A token, a text, or null.
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[VersionSpan | WeightSpan] | UnsetType = UNSET
    # Of each span, the oldest version whose keys and values its tokens may have read; only where it differs.
    kv_from: list[int] | UnsetType = UNSET
    lora_version: int | UnsetType | None = UNSET


class CompletionChoice(Choice, kw_only=True):
    """A choice of /v1/completions, or what it has gained."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunction(msgspec.Struct, kw_only=True):
    """A tool's name and its arguments as JSON, or pieces of them."""

    name: str | UnsetType | None = UNSET
    arguments: str | UnsetType | None = UNSET


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool, or a piece of it."""

    function: CalledFunction
    id: str | UnsetType | None = UNSET
    type: Literal["function"] | UnsetType = UNSET
    # In streams.
    index: int | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """What a message has gained."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    # Why the text from here on is not parsed.
    parsing_error: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """The message that a chat has generated."""

    role: str
    content: str | None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    # Why the text from here on is not parsed.
    parsing_error: str | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """A choice of a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatEventChoice(Choice, kw_only=True):
    """What a choice of a chat has gained."""

    delta: Delta
    logprobs: ChatLogprobs | None


class Head(msgspec.Struct, kw_only=True):
    """The first fields of answers and events."""

    id: str
    # Seconds since 1970.
    created: int
    model: str


class CompletionsAnswer(Head, kw_only=True):
    """The answer of /v1/completions, or an event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    # Of a stream: in the event that was asked for.
    usage: Usage | UnsetType = UNSET


class ChatAnswer(Head, kw_only=True):
    """The answer of a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatEvent(Head, kw_only=True):
    """An event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---- how they are made ----------------------------------------------------------------------


class OpenAIRequest(NamedTuple):
    """A checked request to one of OpenAI's routes."""

    call: Call
    fields: CompletionsFields | ChatFields
    options: SamplingOptions
    prompts: Sequence[Prompt]
    # None: the client requests no log-probabilities.
    texts: TokenTexts | None
    # Whether the response contains the prompts' ids.
    shows_prompt_ids: bool
    # The name of a LoRA adapter; "": the base model.
    adapter: str
    # What vLLM's parsers need; None: the text is not parsed.
    chat: ChatParsing | None = None
    # The prompts' texts, which choices repeat (`echo`); empty: they do not.
    echoed: Sequence[str] = ()

    @property
    def is_chat(self) -> bool:
        return isinstance(self.fields, ChatFields)

    @property
    def role(self) -> str:
        """The role of the message that a chat generates or continues."""
        assert isinstance(self.fields, ChatFields)
        if self.fields.add_generation_prompt:
            return "assistant"
        last = self.fields.messages[-1] if self.fields.messages else {}
        return str(last.get("role", "assistant"))

    def head(self, *, is_stream: bool) -> dict[str, Any]:
        """The first fields of a whole response, or of each event of a stream."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.call.id}",
            "object": f"{kind}.chunk" if is_stream and self.is_chat else kind,
            "created": int(time.time()),
            "model": self.adapter or self.call.facts.model,
        }

    def choice(
        self,
        index: int,
        completion: Completion,
        adapter_version: int | None,
        *,
        before: Sequence[int] = (),
        offset: int = 0,
        num_before: int = 0,
    ) -> dict[str, Any]:
        """A choice without its text or message.

        Args:
            adapter_version: the version of the LoRA adapter that the job ran with.
            before: in a stream, the choice's last ids before this chunk.
            offset: in a stream, the number of characters before this chunk.
            num_before: in a stream, the number of tokens before this chunk.
        """
        logprobs = None
        if self.texts is not None and self.options.logprobs is not None:
            k = self.options.logprobs
            if self.is_chat:
                logprobs = openai_logprobs.of_chat(completion, self.texts, k, before)
            else:
                logprobs = openai_logprobs.of_completion(completion, self.texts, k, before, offset)
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason or None,
            "stop_reason": completion.stop_reason,
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = np.frombuffer(completion.token_ids, np.int32)
            choice["weight_versions"] = completion.weight_versions
            if completion.kv_from:
                choice["kv_from"] = completion.kv_from
            if self.adapter:
                choice["lora_version"] = adapter_version
        if self.fields.return_weight_versions:
            num_tokens = num_before + len(completion.token_ids) // 4
            label_of = self.call.link.label_of
            choice["weight_versions"] = weight_spans(completion, num_tokens, label_of)
        return choice


def whole_answer(request: OpenAIRequest, results: list[Completed]) -> Iterator[bytes]:
    """The response body of a request that is not streamed, as JSON in parts. Empties `results`.

    Raises:
        GenerationFailed: as `prompt_rows`.
    """
    all_ids = expanded_ids(request.prompts, results)
    total = usage(
        sum(map(len, all_ids)),
        sum(len(one.token_ids) // 4 for result in results for one in result.completions),
        sum(result.num_cached_tokens for result in results),
    )
    if (k := request.options.prompt_logprobs) is not None:
        # Before the head is sent: afterwards, an error would cut the answer.
        for prompt, ids, result in zip(request.prompts, all_ids, results, strict=True):
            prompt_rows(result, prompt.location, num_tokens=len(ids), k=k)
    at_top = {}
    if request.is_chat:
        at_top = _prompt_fields(request, request.prompts[0].location, all_ids[0], results[0])
    answer = request.head(is_stream=False)
    return json_parts(
        answer | {"choices": _choices(request, all_ids, results), **at_top, "usage": total}
    )


def _choices(
    request: OpenAIRequest, all_ids: Sequence[np.ndarray], results: list[Completed]
) -> Iterator[dict[str, Any]]:
    numbers = itertools.count()
    texts = request.echoed or [""] * len(results)
    results.reverse()
    for prompt, text, ids in zip(request.prompts, texts, all_ids, strict=True):
        result = results.pop()
        repeated = _echoed_logprobs(request, prompt.location, ids, result)
        before = ids[-MAX_BEFORE:].tolist() if repeated else ()
        for completion in given_up(result.completions):
            choice = request.choice(
                next(numbers), completion, result.adapter_version,
                before=before, offset=sum(map(len, repeated.get("tokens", ()))),
            )  # fmt: skip
            if request.is_chat:
                message = completion.message
                message = {"content": completion.text} if message is None else message
                choice["message"] = {"role": request.role, **message}
            else:
                choice["text"] = text + completion.text
                choice |= _prompt_fields(request, prompt.location, ids, result)
                for name, values in repeated.items():
                    choice["logprobs"][name] = Rows(
                        itertools.chain(values, choice["logprobs"][name])
                    )
            yield choice


def _echoed_logprobs(
    request: OpenAIRequest, location: str, ids: np.ndarray, result: Completed
) -> dict[str, list[Any]]:
    """What of a prompt's `logprobs` each choice repeats before its own; {}: nothing."""
    k = request.options.prompt_logprobs
    if not request.echoed or request.options.logprobs is None or request.texts is None or k is None:
        return {}
    return openai_logprobs.of_echo(result, ids, location, k, request.texts)


def _prompt_fields(
    request: OpenAIRequest, location: str, ids: np.ndarray, result: Completed
) -> dict[str, Any]:
    """Fields about a prompt: a chat has them at the top, completions in each choice."""
    found: dict[str, Any] = {}
    if request.shows_prompt_ids:
        found["prompt_token_ids"] = ids
    k = request.options.prompt_logprobs
    if k is not None and request.texts is not None:
        found["prompt_logprobs"] = openai_logprobs.of_prompt(
            result, ids, location, k, request.texts
        )
    return found
