"""The sampled tokens among a completion's log-probabilities, for front ends and clients."""

import numpy as np


def sampled_of(
    ids: np.ndarray, values: np.ndarray, entry_ids: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """The log-probability of each sampled token, float32 [tokens]; NaN where no entry is its own.

    Args:
        ids: the sampled tokens, int32 [tokens].
        values: of all entries, token after token, float32 [entries].
        entry_ids: the tokens of the entries, int32 [entries].
        counts: the number of entries at each token, [tokens].
    """
    tokens = np.repeat(np.arange(len(ids)), counts)
    own = np.flatnonzero(entry_ids == ids[tokens])
    # Of entries that repeat a token, the first.
    found, first = np.unique(tokens[own], return_index=True)
    sampled = np.full(len(ids), np.nan, np.float32)
    sampled[found] = values[own[first]]
    return sampled
