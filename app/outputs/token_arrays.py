"""Unpacks log-probabilities for all routes, and writes /generate/'s response without an object per token.

Both formats list the n completions of prompt 0 first, then those of prompt 1, and so on.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from app.outputs.json_parts import json_parts
from app.time_slices import sharing_time
from titopool.errors import GenerationFailed
from titopool.wire.logprob_entries import sampled_of
from titopool.wire.messages import Completed, Completion, Logprobs

JSON = "application/json"
MSGPACK = "application/msgpack"

_to_msgpack = msgspec.msgpack.Encoder().encode


def is_binary(accept: str) -> bool:
    """Whether the header Accept prefers MessagePack to JSON; a client of neither gets JSON."""
    if accept in ("", "*/*", JSON):
        # What most clients send; to parse it takes 2 % of a request's time.
        return False
    # Of types with equal quality, one named without `*` wins, then the first.
    types = parse_accept_header(accept, MIMEAccept)
    return types.best_match((JSON, MSGPACK, "application/x-msgpack"), default=JSON) != JSON


def json_reply(
    prompt_ids: Sequence[np.ndarray],
    results: Sequence[Completed],
    *,
    with_logprobs: bool,
    with_raw: bool = False,
) -> list[bytes]:
    """The response of /generate/ as JSON, in parts.

    `logprobs` and `logprob_token_ids` have the shape [completions][tokens][1 to k + 1], or
    are null without `with_logprobs`. A value that is not finite is null.
    """
    completions = _completions(results)
    reply: dict[str, Any] = {
        "prompt_ids": iter(prompt_ids),
        "completion_ids": (
            np.frombuffer(one.token_ids, np.int32) for one in sharing_time(completions)
        ),
        "logprobs": None,
        "logprob_token_ids": None,
    }
    if with_logprobs:
        reply["logprobs"] = map(nested_values, sharing_time(completions))
        reply["logprob_token_ids"] = map(nested_ids, sharing_time(completions))
    reply |= _without_tokens(results)
    if with_raw:
        reply["raw_logprobs"] = (
            np.frombuffer(one, np.float32) for one in sharing_time(raw_logprobs(completions))
        )
    return json_parts(reply)


def binary_reply(
    prompt_ids: Sequence[np.ndarray | None],
    results: Sequence[Completed],
    *,
    with_logprobs: bool,
    with_raw: bool = False,
) -> bytes:
    """The response of /generate/ as MessagePack, with the arrays as the worker sent them.

    Each array is the bytes of a little-endian array, int32 or (`logprobs`) float32. A prompt's
    ids are nil where `prompt_ids` has None.
    """
    completions = _completions(results)
    logprobs = [one.logprobs or Logprobs(b"") for one in completions] if with_logprobs else []
    reply = {
        "prompt_ids": [None if ids is None else ids.data for ids in prompt_ids],
        "completion_ids": [one.token_ids for one in completions],
        "logprobs": [one.values for one in logprobs] if with_logprobs else None,
        "logprob_token_ids": _nil_if_empty([one.token_ids for one in logprobs]),
        "num_logprobs": _nil_if_empty([one.counts for one in logprobs]),
        **_without_tokens(results),
    }
    if with_raw:
        reply["raw_logprobs"] = raw_logprobs(completions)
    return _to_msgpack(reply)


def raw_logprobs(completions: Sequence[Completion]) -> list[bytes]:
    """The sampled tokens' log-probabilities by the model alone, float32 [tokens] of each completion.

    Raises:
        GenerationFailed: a worker did not send them.
    """
    found = [b"" if one.logprobs is None else one.logprobs.raw for one in completions]
    for raw, one in zip(found, completions, strict=True):
        if len(raw) != len(one.token_ids):
            raise GenerationFailed(
                f"expected {len(one.token_ids) // 4} raw log-probabilities, got {len(raw) // 4}; start "
                "every worker with --raw-logprobs"
            )
    return found


def nested_values(completion: Completion) -> Any:
    """The log-probabilities, [tokens][entries at that token]."""
    packed = completion.logprobs
    return [] if packed is None else _split(np.frombuffer(packed.values, np.float32), packed)


def nested_ids(completion: Completion) -> Any:
    """The token ids of the log-probabilities, [tokens][entries at that token]."""
    packed = completion.logprobs
    if packed is None:
        return []
    return _split(np.frombuffer(packed.token_ids or completion.token_ids, np.int32), packed)


def sampled_logprobs(completion: Completion) -> np.ndarray:
    """The sampled tokens' log-probabilities, float32 [tokens]; NaN where the worker sent none."""
    packed = completion.logprobs or Logprobs(b"")
    values = np.frombuffer(packed.values, np.float32)
    ids = np.frombuffer(completion.token_ids, np.int32)
    entry_ids = np.frombuffer(packed.token_ids, np.int32)
    if not len(entry_ids):
        return values
    counts = np.frombuffer(packed.counts, np.int32) if packed.counts else np.ones_like(ids)
    return sampled_of(ids, values, entry_ids, counts)


def weight_spans(
    completion: Completion, num_tokens: int, label_of: Callable[[int], str]
) -> list[dict[str, Any]]:
    """vLLM's `weight_versions`: the tokens in [start, end) were sampled by weights `version`.

    Args:
        num_tokens: the completion's tokens so far, with those of earlier chunks.
        label_of: the label of a version, as `app.pool.link.Link.label_of`.
    """
    spans = completion.weight_versions
    ends = [*(start for _, start in spans[1:]), num_tokens]
    return [
        {"version": label_of(version), "start": start, "end": end}
        for (version, start), end in zip(spans, ends, strict=False)
        if start < end
    ]


class PromptRows(NamedTuple):
    """A prompt's log-probabilities, [tokens - 1, k + 1]: in each row the token, then the best k."""

    # float32.
    values: np.ndarray
    # int32.
    token_ids: np.ndarray
    # int32, from 1.
    ranks: np.ndarray


def prompt_rows(result: Completed, location: str, *, num_tokens: int, k: int) -> PromptRows:
    """The log-probabilities of a prompt of `num_tokens` that requested the best `k`.

    Raises:
        GenerationFailed: the worker did not send all of them.
    """
    packed = result.prompt_logprobs or Logprobs(b"")
    values = np.frombuffer(packed.values, np.float32)
    token_ids, ranks = (np.frombuffer(one, np.int32) for one in (packed.token_ids, packed.ranks))
    expected = max(0, num_tokens - 1) * (k + 1)
    if not len(values) == len(token_ids) == len(ranks) == expected:
        raise GenerationFailed(
            f"{location}: expected {expected} log-probabilities of the prompt, got {len(values)}; "
            "send the request again"
        )
    return PromptRows(*(one.reshape(-1, k + 1) for one in (values, token_ids, ranks)))


def _split(array: np.ndarray, packed: Logprobs) -> Any:
    if not packed.counts:
        return array.reshape(-1, 1)
    ends = np.cumsum(np.frombuffer(packed.counts, np.int32))
    return np.split(array, ends[:-1])


def _nil_if_empty(arrays: list[bytes]) -> list[bytes | None] | None:
    return [one or None for one in arrays] if any(arrays) else None


def _completions(results: Sequence[Completed]) -> list[Completion]:
    return [completion for result in results for completion in result.completions]


def _without_tokens(results: Sequence[Completed]) -> dict[str, Any]:
    """The fields that are equal in JSON and MessagePack."""
    completions = _completions(results)
    versions = [result.adapter_version for result in results]
    ranges = [result.image_ranges for result in results]
    return {
        **({"image_ranges": ranges} if any(ranges) else {}),
        **({"lora_versions": versions} if any(one is not None for one in versions) else {}),
        "finish_reasons": [one.finish_reason for one in completions],
        "weight_versions": [one.weight_versions for one in completions],
        "num_cached_tokens": [result.num_cached_tokens for result in results],
    }
