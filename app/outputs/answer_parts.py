"""Parts of answers that several protocols have."""

import msgspec
from msgspec import UNSET, UnsetType

from titopool.answers.generation import Value, VersionSpan


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
    # The label of the oldest weights whose keys and values these tokens may have read; only where it differs.
    kv_from: str | UnsetType = UNSET


class PromptToken(msgspec.Struct, kw_only=True):
    """The log-probability of a token of a prompt, or of one that was likelier."""

    logprob: float
    rank: int
    decoded_token: str | None


# By token id as text; null at the first token. The prompt's own token is the first key.
PromptLogprobs = list[dict[str, PromptToken] | None]


class ChatTopToken(msgspec.Struct, kw_only=True):
    """One of the best tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatTopToken, kw_only=True):
    """A sampled token, with the best ones."""

    top_logprobs: list[ChatTopToken]


class SampledFields(msgspec.Struct, kw_only=True):
    """What the engine got and sampled, with `return_token_ids`; lists are [tokens]."""

    # Why the text from some place on is not parsed, also without `return_token_ids`.
    parsing_error: str | UnsetType = UNSET
    # The engine's own, also where the dialect has no word for it.
    finish_reason: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    # Of the sampled tokens.
    token_logprobs: list[Value] | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET
    # Of each span, the oldest version whose keys and values its tokens may have read; only where it differs.
    kv_from: list[int] | UnsetType = UNSET
    # Only with an adapter.
    lora_version: int | UnsetType | None = UNSET
