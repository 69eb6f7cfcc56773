"""Unpacks log-probabilities for all routes, and writes /generate/'s response without an object per token.

Both formats list the n completions of prompt 0 first, then those of prompt 1, and so on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from app.outputs.json_parts import Rows, json_parts, short_json
from app.outputs.msgpack_parts import msgpack_parts
from app.time_slices import give_way_after, sharing_time
from titopool.errors import GenerationFailed
from titopool.wire.logprob_entries import sampled_of
from titopool.wire.messages import Completed, Completion, Logprobs

Item = TypeVar("Item")
JSON = "application/json"
MSGPACK = "application/msgpack"
# An answer is short with so many bytes of ids and log-probabilities, where a completion counts for more:
# it is made in about a millisecond.
SHORT_BYTES, BYTES_OF_COMPLETION = 16 * 1024, 128


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
    results: list[Completed],
    *,
    with_logprobs: bool,
    with_raw: bool = False,
) -> Iterator[bytes] | list[bytes]:
    """The response of /generate/ as JSON, in parts: one if it is short. Empties `results`.

    `logprobs` and `logprob_token_ids` have the shape [completions][tokens][1 to k + 1], or
    are null without `with_logprobs`. A value that is not finite is null.
    """
    columns = _Columns(results, with_raw=with_raw)
    num_bytes = sum(map(len, columns.token_ids)) + sum(map(len, columns.values))
    num_bytes += sum(ids.nbytes for ids in prompt_ids)
    num_bytes += BYTES_OF_COMPLETION * len(columns.token_ids)
    give_way_after(len(columns.token_ids))
    rest = _without_tokens(results)
    give_way_after(len(columns.token_ids))
    # Nothing else may refer to an array, so that it is freed once it is written.
    results.clear()
    reply: dict[str, Any] = {
        "prompt_ids": iter(prompt_ids),
        "completion_ids": _given_up(columns.token_ids, np.int32),
        "logprobs": None,
        "logprob_token_ids": None,
    }
    if with_logprobs:
        counts = columns.counts
        values, ids = columns.values, columns.entry_ids
        reply["logprobs"] = map(nested, _given_up(values, np.float32), counts)
        reply["logprob_token_ids"] = map(nested, _given_up(ids, np.int32), counts)
    reply |= rest
    if with_raw:
        reply["raw_logprobs"] = _given_up(columns.raw, np.float32)
    return [short_json(reply)] if num_bytes <= SHORT_BYTES else json_parts(reply)


def binary_reply(
    prompt_ids: Sequence[np.ndarray | None],
    results: list[Completed],
    *,
    with_logprobs: bool,
    with_raw: bool = False,
) -> list[bytes]:
    """The response of /generate/ as MessagePack, in parts, with the arrays as the worker sent them.
    Empties `results`.

    Each array is the bytes of a little-endian array, int32 or (`logprobs`) float32. A prompt's
    ids are nil where `prompt_ids` has None.
    """
    columns = _Columns(results, with_raw=with_raw)
    give_way_after(len(columns.token_ids))
    rest = _without_tokens(results)
    give_way_after(len(columns.token_ids))
    results.clear()
    reply = {
        "prompt_ids": [None if ids is None else ids.tobytes() for ids in prompt_ids],
        "completion_ids": columns.token_ids,
        "logprobs": columns.values if with_logprobs else None,
        "logprob_token_ids": _nil_if_empty(columns.named_ids) if with_logprobs else None,
        "num_logprobs": _nil_if_empty(columns.counts) if with_logprobs else None,
        **rest,
    }
    if with_raw:
        reply["raw_logprobs"] = columns.raw
    return msgpack_parts(reply)


class _Columns:
    """The arrays of all completions, in order."""

    def __init__(self, results: Sequence[Completed], *, with_raw: bool):
        completions = _completions(results)
        packed = [one.logprobs or Logprobs(b"") for one in completions]
        self.token_ids = [one.token_ids for one in completions]
        self.values = [one.values for one in packed]
        self.counts = [one.counts for one in packed]
        # Of the log-probabilities; empty where they are the completion's own.
        self.named_ids = [one.token_ids for one in packed]
        self.raw = raw_logprobs(completions) if with_raw else []

    @property
    def entry_ids(self) -> list[bytes]:
        """Of the log-probabilities; none where there are none."""
        named = zip(self.named_ids, self.token_ids, self.values, strict=True)
        return [ids or (own if values else b"") for ids, own, values in named]


def given_up(items: list[Item]) -> Iterator[Item]:
    """The items of a list, which is emptied: each is freed once the next one is asked for."""
    items.reverse()
    for _ in sharing_time(range(len(items))):
        yield items.pop()


def _given_up(column: list[bytes], dtype: Any) -> Iterator[np.ndarray]:
    """The arrays of `column`, which is emptied."""
    return (np.frombuffer(one, dtype) for one in given_up(column))


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


def nested(array: np.ndarray, counts: bytes) -> np.ndarray | Rows:
    """`array` as [tokens][entries at that token].

    Args:
        counts: int32 [tokens], the entries; empty: each token has one.
    """
    return Rows(_split(array, counts)) if counts else array.reshape(-1, 1)


def _split(array: np.ndarray, counts: bytes) -> Iterator[np.ndarray]:
    begin = 0
    for end in np.cumsum(np.frombuffer(counts, np.int32)).tolist():
        yield array[begin:end]
        begin = end


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
    kv_from = [{"kv_from": label_of(one)} for one in completion.kv_from] or [{}] * len(spans)
    return [
        {"version": label_of(version), "start": start, "end": end, **keys}
        for (version, start), end, keys in zip(spans, ends, kv_from, strict=False)
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


def _nil_if_empty(arrays: list[bytes]) -> list[bytes | None] | None:
    return [one or None for one in arrays] if any(arrays) else None


def _completions(results: Sequence[Completed]) -> list[Completion]:
    return [completion for result in results for completion in result.completions]


def _without_tokens(results: Sequence[Completed]) -> dict[str, Any]:
    """The fields that are equal in JSON and MessagePack."""
    completions = _completions(results)
    versions = [result.adapter_version for result in results]
    ranges = [result.image_ranges for result in results]
    kv_from = [one.kv_from for one in completions]
    return {
        **({"image_ranges": ranges} if any(ranges) else {}),
        **({"lora_versions": versions} if any(one is not None for one in versions) else {}),
        **({"kv_from": kv_from} if any(kv_from) else {}),
        "finish_reasons": [one.finish_reason for one in completions],
        "weight_versions": [one.weight_versions for one in completions],
        "num_cached_tokens": [result.num_cached_tokens for result in results],
    }
