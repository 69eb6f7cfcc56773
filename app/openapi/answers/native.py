"""Answers of vLLM's and SGLang's native routes for tokens, whole and as events of streams."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.openapi.answers.openai import PromptLogprobs, Usage, WeightSpan
from app.openapi.answers.tokens import FinishReason
from app.schemas.features import Placeholders

# ---- /inference/v1/generate --------------------------------------------------------------


class TopToken(msgspec.Struct, kw_only=True):
    """A token by its id; `token` is `token_id:<id>`."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: None


class Token(TopToken, kw_only=True):
    """A sampled token, with the best or the chosen ones."""

    top_logprobs: list[TopToken]


class TokensLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities by sampled token."""

    content: list[Token]


class RoutedExperts(msgspec.Struct, kw_only=True):
    """The experts of each token: base64 of an array in C order."""

    data: str
    # [rows, layers, experts of a token]
    shape: list[int]
    start: int
    dtype: str


class TokensChoice(msgspec.Struct, kw_only=True):
    """A completion, or what it has gained."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: TokensLogprobs | None
    weight_versions: list[WeightSpan]
    # With the format `npy`: base64 of an .npy file.
    routed_experts: RoutedExperts | str | None
    # [tokens][ids]
    sampling_mask: list[list[int]] | None
    lora_version: int | UnsetType | None = UNSET


class TokensEvent(msgspec.Struct, kw_only=True):
    """An event of a stream."""

    request_id: str
    output_mode: Literal["tokens"]
    choices: list[TokensChoice]
    usage: Usage | None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    mm_placeholders: Placeholders | UnsetType | None = UNSET


class TokensAnswer(msgspec.Struct, kw_only=True):
    """The completions of one prompt."""

    request_id: str
    output_mode: Literal["tokens"]
    model: str
    # Seconds since 1970.
    created: int
    choices: list[TokensChoice]
    usage: Usage
    prompt_token_ids: list[int] | None
    mm_placeholders: Placeholders | None
    prompt_logprobs: PromptLogprobs | None


# ---- SGLang's /generate ------------------------------------------------------------------

# Log-probability, token id, text. A prompt's first token has no log-probability.
Entry = tuple[float | None, int, str | None]


class SGLangFinish(msgspec.Struct, kw_only=True):
    """Why a completion has ended."""

    type: Literal["stop", "length", "abort"]
    # Of stop: the token or the text.
    matched: int | str | UnsetType | None = UNSET
    length: int | UnsetType = UNSET
    # Of abort.
    message: str | UnsetType = UNSET
    status_code: UnsetType | None = UNSET
    err_type: UnsetType | None = UNSET


class SGLangMeta(msgspec.Struct, kw_only=True):
    """Facts of a completion, and the log-probabilities that were asked for."""

    id: str
    finish_reason: SGLangFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[WeightSpan]
    lora_version: int | UnsetType | None = UNSET
    input_token_logprobs: list[Entry] | UnsetType = UNSET
    output_token_logprobs: list[Entry] | UnsetType = UNSET
    input_top_logprobs: list[list[Entry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Entry]] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Entry]] | UnsetType = UNSET
    # base64 of int32, [tokens, layers, experts of a token]; null without the server's option.
    routed_experts: str | UnsetType | None = UNSET


class SGLangCompletion(msgspec.Struct, kw_only=True):
    """A completion; in events of a stream as far as it has come."""

    text: str
    output_ids: list[int]
    meta_info: SGLangMeta
    prompt_token_ids: list[int] | UnsetType = UNSET
    # In events of several completions.
    index: int | UnsetType = UNSET
