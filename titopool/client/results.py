"""What the client's calls return. Arrays are read-only: they share the memory of the answer."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled sequence."""

    # int32, [tokens]: exactly the ids that the engine sampled.
    ids: np.ndarray
    # float32, [tokens]: of each sampled token, after temperature and penalties. None: not asked for.
    logprobs: np.ndarray | None
    # [tokens] of int32 and float32, [entries of the token]: the k best and the sampled token, best
    # first. None: only the sampled tokens' were asked for.
    top_ids: tuple[np.ndarray, ...] | None
    top_logprobs: tuple[np.ndarray, ...] | None
    # stop, length, repetition or abort.
    finish_reason: str
    # (version, index of the first token that these weights sampled), in order.
    weight_versions: tuple[tuple[int, int], ...]
    # Of the LoRA adapter; None: without one.
    lora_version: int | None
    # float32, [tokens]: by the model's logits alone. None: `raw_logprobs` was not asked for.
    raw_logprobs: np.ndarray | None = None
    # Of each span of `weight_versions`, the oldest version whose keys and values its tokens may have read;
    # empty: those are its own.
    kv_from: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptResult:
    """The completions of one prompt."""

    # int32, [tokens]: as the engine ran them, with image placeholders expanded.
    prompt_ids: np.ndarray
    # [n].
    completions: tuple[Completion, ...]
    # Prompt tokens that the prefix cache had.
    num_cached_tokens: int
    # Offset and length of each image in `prompt_ids`; empty if an abort came before they were placed.
    image_ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """The log-probabilities of one sequence after its prompt."""

    # float32, [tokens]: the sequence's own tokens; -inf for a first token without a prompt.
    logprobs: np.ndarray
    # int32 and float32, [tokens, k]: the k best tokens at each position, best first.
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SessionSample:
    """The turns of a session from the first one to one that nothing goes on from."""

    # Numbers of the turns, and why each begins a branch; "": it does not.
    turns: tuple[int, ...]
    reasons: tuple[str, ...]
    # Whether the agent sent the last turn's request more than once, and this answer is not the last one or
    # another one was gone on from.
    was_retried: bool
    # The index of the first sampled token.
    prompt_length: int
    # int32, [tokens]: as the engine got and sampled them, with image placeholders expanded.
    ids: np.ndarray
    # uint8, [tokens]: 1 at each sampled token; a turn that several samples have counts in one of them.
    loss_mask: np.ndarray
    # float32, [tokens]: 0 at tokens that were not sampled.
    logprobs: np.ndarray
    # (version, index in `ids` of the first token that these weights sampled), in order.
    weight_versions: tuple[tuple[int, int], ...]
    # Of each turn.
    finish_reasons: tuple[str, ...]
    models: tuple[str, ...]
    # Of LoRA adapters; None: the base model sampled the turn.
    lora_versions: tuple[int | None, ...]
    # Offset and length of each image in `ids`, and the files as the agent sent them.
    image_ranges: tuple[tuple[int, int], ...]
    images: tuple[bytes, ...]
    # [tokens - 1, layers, experts of a token]; None: the server runs without
    # `--enable-return-routed-experts`, or a turn was aborted early.
    routed_experts: np.ndarray | None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What one worker is doing."""

    # None: it has not reported yet.
    worker: str | None
    # As in docs/operators.md: importing, loading, …, ready.
    phase: str
    # Seconds in this phase; None: it has not reported yet.
    phase_s: float | None
    weight_version: int | None
    # Only for clients with a key, if the server has one.
    reason: str | None = None

    def __str__(self) -> str:
        since = "" if self.phase_s is None else f" for {self.phase_s:.0f} s"
        why = f": {self.reason}" if self.reason else ""
        return f"worker {self.worker or '?'} {self.phase}{since}{why}"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's release and model."""

    # titopool's.
    release: str
    model: str
    max_model_len: int
    # The versions of the LoRA adapters, by name.
    adapters: Mapping[str, int]
    # The label of the weights that serve: their version as text, unless a trainer gave a name.
    weight_version: str
