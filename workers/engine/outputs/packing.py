"""Packs vLLM's log-probabilities, routed experts and sampling masks for front ends."""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from titopool.wire.messages import Logprobs, RoutedExperts, SamplingMask


class FlatPart(NamedTuple):
    """The last positions of a FlatLogprobs, copied."""

    start_indices: Sequence[int]
    end_indices: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]
    # One for each position, or none: `workers/in_model/logprobs_patch.py`.
    raw: Sequence[float]


def pack_since(flat: Any, position: int, completion_ids: list[int]) -> Logprobs:
    """As `pack_logprobs`, from `position` on; without numpy for a few positions of one entry."""
    if len(flat.token_ids) > len(flat.start_indices):
        ids = np.array(completion_ids, dtype=np.int32).tobytes()
        return pack_logprobs(_flat_since(flat, position), ids)
    named = array("i", flat.token_ids[position:])
    return Logprobs(
        array("f", flat.logprobs[position:]).tobytes(),
        b"" if named == array("i", completion_ids) else named.tobytes(),
        ranks=array("i", flat.ranks[position:]).tobytes(),
        raw=array("f", _raw(flat)[position:]).tobytes(),
    )


def _flat_since(flat: Any, position: int) -> FlatPart:
    """A copy of `flat` from `position` on."""
    begin = flat.end_indices[position - 1] if position else 0
    return FlatPart(
        [index - begin for index in flat.start_indices[position:]],
        [index - begin for index in flat.end_indices[position:]],
        flat.token_ids[begin:],
        flat.logprobs[begin:],
        flat.ranks[begin:],
        _raw(flat)[position:],
    )


def pack_logprobs(flat: Any, completion_ids: bytes) -> Logprobs:
    """A completion's FlatLogprobs as arrays, with each position's entries sorted best first.

    Args:
        flat: vLLM's FlatLogprobs.
        completion_ids: the sampled tokens, int32.
    """
    values = np.array(flat.logprobs, dtype=np.float32)
    token_ids = np.array(flat.token_ids, dtype=np.int32)
    num_positions = len(flat.start_indices)
    ranks = np.array(flat.ranks, dtype=np.int32)
    counts = b""
    if len(values) > num_positions:
        # vLLM's first entry of a position is the sampled token.
        ranks = ranks[np.array(flat.start_indices)]
        values, token_ids, counts = _best_first(flat, values, token_ids)
    ids = token_ids.tobytes()
    if len(values) == num_positions:
        # One entry a position, also with k = 1 where each sampled token was the best one.
        counts = b""
        ids = b"" if ids == completion_ids else ids
    raw = np.array(_raw(flat), dtype=np.float32)
    return Logprobs(values.tobytes(), ids, counts, ranks.tobytes(), raw.tobytes())


def _raw(flat: Any) -> Sequence[float]:
    found: Sequence[float] = getattr(flat, "raw", [])
    return found


def pack_prompt_logprobs(flat: Any) -> Logprobs:
    """A prompt's FlatLogprobs as arrays, in vLLM's order; the first token has no entries."""
    values = np.array(flat.logprobs, dtype=np.float32)
    ids, ranks = (np.array(one, dtype=np.int32) for one in (flat.token_ids, flat.ranks))
    return Logprobs(values.tobytes(), ids.tobytes(), ranks=ranks.tobytes())


def pack_experts(rows: np.ndarray | None, start: int) -> RoutedExperts | None:
    """vLLM's routed experts from prompt token `start` on; None where vLLM gives none."""
    if rows is None:
        return None
    return RoutedExperts(rows.tobytes(), rows.shape, rows.dtype.name, start)  # type: ignore[arg-type]


def pack_mask(mask: Any) -> SamplingMask | None:
    """vLLM's SamplingMask as arrays; None for None."""
    if mask is None:
        return None
    ids = np.fromiter(chain.from_iterable(mask.token_ids), dtype=np.int32)
    counts = np.fromiter(map(len, mask.token_ids), dtype=np.int32)
    return SamplingMask(ids.tobytes(), counts.tobytes())


def _best_first(
    flat: Any, values: np.ndarray, token_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Sorted values and token ids without duplicates, and the number of entries at each position.

    At each position vLLM has the sampled token, then the best k: a sampled token among the best k
    comes twice.
    """
    num_positions = len(flat.start_indices)
    counts = np.array(flat.end_indices) - np.array(flat.start_indices)
    position = np.repeat(np.arange(num_positions), counts)
    is_first = np.zeros(len(values), dtype=bool)
    is_first[np.array(flat.start_indices)] = True
    sampled = token_ids[np.array(flat.start_indices)][position]
    repeated = np.zeros(num_positions, dtype=bool)
    repeated[position[(token_ids == sampled) & ~is_first]] = True
    keep = ~(is_first & repeated[position])
    # By value, then rank: with `logprob_token_ids`, vLLM's rank is only the entry's number. NaN is last.
    order = np.lexsort((np.array(flat.ranks, dtype=np.int64), -values, position))
    order = order[keep[order]]
    kept = np.bincount(position[keep], minlength=num_positions).astype(np.int32)
    return values[order], token_ids[order], kept.tobytes()
