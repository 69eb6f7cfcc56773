"""vLLM's log-probabilities as arrays, as they travel."""

from typing import Any, NamedTuple

import numpy as np

from titopool.wire.messages import Logprobs


class FlatPart(NamedTuple):
    """The positions of a FlatLogprobs from one on; its lists are shared with nobody."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


def flat_since(flat: Any, position: int) -> FlatPart:
    """What `flat` has at `position` and behind it."""
    begin = flat.end_indices[position - 1] if position else 0
    return FlatPart(
        [index - begin for index in flat.start_indices[position:]],
        [index - begin for index in flat.end_indices[position:]],
        flat.token_ids[begin:],
        flat.logprobs[begin:],
        flat.ranks[begin:],
    )


def pack_logprobs(flat: Any, completion_ids: bytes) -> Logprobs:
    """vLLM's FlatLogprobs of a completion as arrays, each position's entries sorted best first."""
    values = np.array(flat.logprobs, dtype=np.float32)
    token_ids = np.array(flat.token_ids, dtype=np.int32)
    num_positions = len(flat.start_indices)
    counts = b""
    if len(values) > num_positions:
        values, token_ids, counts = _best_first(flat, values, token_ids)
    ids = token_ids.tobytes()
    if len(values) == num_positions:
        # Also where more were asked for: the sampled token was the best one everywhere.
        return Logprobs(values.tobytes(), b"" if ids == completion_ids else ids)
    return Logprobs(values.tobytes(), ids, counts)


def pack_prompt_logprobs(flat: Any) -> Logprobs:
    """vLLM's FlatLogprobs of a prompt, as they are; the first token has none."""
    values = np.array(flat.logprobs, dtype=np.float32)
    ids, ranks = (np.array(one, dtype=np.int32) for one in (flat.token_ids, flat.ranks))
    return Logprobs(values.tobytes(), ids.tobytes(), ranks=ranks.tobytes())


def _best_first(
    flat: Any, values: np.ndarray, token_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Values and token ids sorted, each token once, and the entries at each position.

    vLLM puts the sampled token first at each position and the best k behind it: the sampled
    one stands twice when it is among them.
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
    # By value, then rank: with `logprob_token_ids`, vLLM's ranks only count the entries. NaN goes last.
    order = np.lexsort((np.array(flat.ranks, dtype=np.int64), -values, position))
    order = order[keep[order]]
    kept = np.bincount(position[keep], minlength=num_positions).astype(np.int32)
    return values[order], token_ids[order], kept.tobytes()
