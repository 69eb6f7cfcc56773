"""Answers of the routes of sessions."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from titopool.answers.generation import Float32s, Int32s

_BINARY = {"contentEncoding": "binary"}
Uint8s = Annotated[str, Meta(description="bin: uint8", extra_json_schema=_BINARY)]
Bytes = Annotated[str, Meta(description="bin", extra_json_schema=_BINARY)]
# Why a branch begins; "": the turn goes on from its parent.
Reason = Literal[
    "", "first", "system", "context", "history", "template", "prefill", "fork", "retry", "choice"
]


class SessionMade(msgspec.Struct, kw_only=True):
    """A new session."""

    # 128 random bits.
    session_id: str
    # The path of the base URL for clients.
    path: str
    # What opens it in place of a client's key.
    key: str


class SessionUsage(msgspec.Struct, kw_only=True):
    """Tokens of all turns."""

    # As the engine got them; those of turns before count in each turn.
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TurnAnswer(msgspec.Struct, kw_only=True):
    """A turn of the tree."""

    number: int
    # The turn that it goes on from; null: none.
    parent: int | None
    # Why it begins a branch; empty: it does not.
    reason: Reason
    # The request's messages after the parent's turn, and what was sampled.
    messages: list[dict[str, Any]]
    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    # [version, index of its first token] of the completion.
    weight_versions: list[tuple[int, int]]
    model: str
    lora_version: int | None
    request_id: str
    path: str
    # Seconds since 1970.
    began_s: float
    ended_s: float
    # How the template would write the turns before in another way than they were sent; null: it would not.
    mismatch: str | None


class SessionAnswer(msgspec.Struct, kw_only=True):
    """What is known of a session."""

    session_id: str
    # The maker's; with `records` also miles' `tito_session_mismatch`, `accumulated_token_ids` and
    # `max_trim_tokens` (`GetSessionResponse` of its session server).
    metadata: dict[str, Any]
    # Seconds since 1970.
    made_s: float
    used_s: float
    num_branches: int
    num_mismatches: int
    usage: SessionUsage
    turns: list[TurnAnswer]
    # Each turn with all messages and ids of its prompt, as miles has it (`SessionRecord`); empty with
    # `records=false`.
    records: list[dict[str, Any]] = []


class SessionEndedAnswer(msgspec.Struct, kw_only=True):
    """A session has ended."""

    # How many turns it had, as rLLM's client reads it.
    deleted: int


class TraceAnswer(msgspec.Struct, kw_only=True):
    """A turn, as rLLM's gateway has it (`TraceRecord` of rllm-model-gateway 0.1.0)."""

    trace_id: str
    session_id: str
    model: str
    # All of the request.
    messages: list[dict[str, Any]]
    # As the engine got them.
    prompt_token_ids: list[int]
    response_message: dict[str, Any]
    completion_token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str
    latency_ms: float
    # `prompt` and `completion`.
    token_counts: dict[str, int]
    # Seconds since 1970.
    timestamp: float
    # The maker's of the session.
    metadata: dict[str, Any]
    # The bodies are not kept.
    raw_request: None = None
    raw_response: None = None


class SampleExperts(msgspec.Struct, kw_only=True):
    """The routed experts of all ids but the last one, in C order."""

    # Base64.
    data: str
    # [ids - 1, layers, experts of a token]
    shape: tuple[int, int, int]
    # 0.
    start: int
    # "uint8" or "uint16".
    dtype: str


class BinarySampleExperts(SampleExperts, kw_only=True):
    """The same in MessagePack."""

    data: Bytes


class SampleAnswer(msgspec.Struct, kw_only=True):
    """The turns from the first one to one that nothing goes on from."""

    turns: list[int]
    # Of each turn: why it begins a branch; empty: it does not.
    reasons: list[Reason]
    # Whether the client sent the last turn's request more than once, and this answer is not the last one
    # or another one was gone on from.
    was_retried: bool
    # The index of the first sampled token.
    prompt_length: int
    # As the engine got and sampled them.
    ids: list[int]
    # 1 at each sampled token; a turn that several samples have counts in one of them.
    loss_mask: list[int]
    # 0 at tokens that were not sampled.
    logprobs: list[float | None]
    # [version, index of its first token in `ids`].
    weight_versions: list[tuple[int, int]]
    # Of each turn.
    finish_reasons: list[str]
    models: list[str]
    # Of each turn; null: the base model sampled it.
    lora_versions: list[int | None]
    # Offset and length of each image in `ids`, and the files as the client sent them, in base64.
    image_ranges: list[tuple[int, int]]
    images: list[str]
    # null: the server runs without `--enable-return-routed-experts`, or a turn was aborted early.
    routed_experts: SampleExperts | None


class Samples(msgspec.Struct, kw_only=True):
    """What a trainer takes of a session."""

    session_id: str
    metadata: dict[str, Any]
    samples: list[SampleAnswer]


class BinarySampleAnswer(SampleAnswer, kw_only=True):
    """The same in MessagePack."""

    ids: Int32s  # type: ignore[assignment]
    loss_mask: Uint8s  # type: ignore[assignment]
    logprobs: Float32s  # type: ignore[assignment]
    images: list[Bytes]
    routed_experts: BinarySampleExperts | None


class BinarySamples(msgspec.Struct, kw_only=True):
    """The same as one MessagePack map, in which arrays are `bin`."""

    session_id: str
    metadata: dict[str, Any]
    samples: list[BinarySampleAnswer]
