"""Answers of TRL's generating routes, and of scores. Lists are [prompts × n][tokens]."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

FinishReason = Literal["stop", "length", "repetition", "abort"]
# A value that is not finite is null.
Value = float | None
# The version of the weights, and the first token that they sampled.
VersionSpan = tuple[int, int]
Range = tuple[int, int]
_BINARY = {"contentEncoding": "binary"}
Int32s = Annotated[str, Meta(description="bin: little-endian int32", extra_json_schema=_BINARY)]
Float32s = Annotated[str, Meta(description="bin: little-endian float32", extra_json_schema=_BINARY)]
Base64 = Annotated[str, Meta(extra_json_schema={"contentEncoding": "base64"})]


class CompletionFacts(msgspec.Struct, kw_only=True):
    """What both forms of the answer say alike: by completion, by prompt where the name says so."""

    finish_reasons: list[FinishReason]
    weight_versions: list[list[VersionSpan]]
    # By prompt.
    num_cached_tokens: list[int]
    # Of each span of `weight_versions`, the oldest version whose keys and values its tokens may have read;
    # []: its own. Only after an update that kept caches.
    kv_from: list[list[int]] | UnsetType = UNSET
    # By prompt; only with an adapter.
    lora_versions: list[int | None] | UnsetType = UNSET
    # By prompt; only with images.
    image_ranges: list[list[Range]] | UnsetType = UNSET


class GenerateAnswer(CompletionFacts, kw_only=True):
    """Token ids and log-probabilities; the n completions of prompt 0 come first."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[list[Value]]] | None
    logprob_token_ids: list[list[list[int]]] | None
    raw_logprobs: list[list[Value]] | UnsetType = UNSET


class BinaryGenerateAnswer(CompletionFacts, kw_only=True):
    """The same as one MessagePack map; arrays are `bin`, and what the client knows already is nil."""

    prompt_ids: list[Int32s | None]
    completion_ids: list[Int32s]
    logprobs: list[Float32s] | None
    logprob_token_ids: list[Int32s | None] | None
    num_logprobs: list[Int32s | None] | None
    raw_logprobs: list[Float32s] | UnsetType = UNSET


class SequencesAnswer(msgspec.Struct, kw_only=True):
    """Log-probabilities of given sequences, [sequences][tokens][entries], best first."""

    logprobs: list[list[list[Value]]]
    logprob_token_ids: list[list[list[int]]]


class BinarySequencesAnswer(msgspec.Struct, kw_only=True):
    """The same in arrays: base64 of little-endian float32 and int32, padded with -inf and 0."""

    logprobs_b64: Base64
    token_ids_b64: Base64
    actual_logprobs_b64: Base64
    actual_token_ids_b64: Base64
    # [sequences, longest, k]
    shape: tuple[int, int, int]
    completion_lengths: list[int]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The ids of a text or of messages."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text of token ids."""

    prompt: str
    # With `return_token_texts`: what each id adds to the text.
    token_texts: list[str] | UnsetType = UNSET


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
