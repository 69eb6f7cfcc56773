"""Answers of OpenAI's routes, whole and as events of streams."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.openapi.answers.tokens import VersionSpan

FinishReason = Literal["stop", "length", "repetition", "abort", "tool_calls"]


class CachedTokens(msgspec.Struct, kw_only=True):
    """Of the prompt, in tokens."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class WeightSpan(msgspec.Struct, kw_only=True):
    """The weights with the label `version` sampled the tokens from `start` to before `end`."""

    version: str
    start: int
    end: int


class PromptToken(msgspec.Struct, kw_only=True):
    """The log-probability of a token of a prompt, or of one that was likelier."""

    logprob: float
    rank: int
    decoded_token: str | None


# By token id as text; null at the first token. The prompt's own token is the first key.
PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a choice of /v1/completions, by token."""

    tokens: list[str]
    # With `echo`, null at the prompt's first token.
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatTopToken(msgspec.Struct, kw_only=True):
    """One of the best tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatTopToken, kw_only=True):
    """A sampled token, with the best ones."""

    top_logprobs: list[ChatTopToken]


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


class Model(msgspec.Struct, kw_only=True):
    """The base model or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    vocab_size: int
    # Of an adapter.
    version: int | UnsetType = UNSET


class Models(msgspec.Struct, kw_only=True):
    """What /v1/models lists."""

    object: Literal["list"]
    data: list[Model]


class Render(msgspec.Struct, kw_only=True):
    """A body for /inference/v1/generate, whose fields its schema describes."""

    request_id: str
    model: str
    token_ids: list[int]
    features: dict[str, Any] | None
    sampling_params: dict[str, Any]
    stream: bool | UnsetType = UNSET
    stream_options: dict[str, Any] | UnsetType = UNSET
    cache_salt: str | UnsetType = UNSET
    session_id: str | UnsetType = UNSET
    return_token_ids: bool | UnsetType = UNSET
    mm_processor_kwargs: dict[str, Any] | UnsetType = UNSET
    min_weight_version: int | UnsetType = UNSET
