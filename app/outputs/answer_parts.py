"""Parts of answers that several protocols have."""

import msgspec


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
