"""Stop ids by which completions of a model with random weights get geometric lengths."""

import math
from typing import Any

from titopool.settings.sampling import MAX_ENTRIES

# This server's limit. vLLM's sampler on GPUs has a table of 128, with the model's own stop ids.
MOST_STOP_IDS = MAX_ENTRIES["stop_token_ids"]


def choose_stops(vocab_size: int, mean: float) -> tuple[dict[str, Any], str]:
    """Sampling options by which a uniform model ends after `mean` tokens, and what they are."""
    wanted = max(1, round(vocab_size / mean))
    if wanted <= MOST_STOP_IDS:
        # Spread, so that the ids of one kind of token do not decide.
        ids = [vocab_size * (2 * index + 1) // (2 * wanted) for index in range(wanted)]
        explained = f"{wanted} stop ids of {vocab_size:,} for a mean of {mean:g}"
        return {"stop_token_ids": ids}, explained
    bias = math.log((vocab_size - 1) / (mean - 1))
    stop = vocab_size // 2
    return {"stop_token_ids": [stop], "logit_bias": {str(stop): bias}}, (
        f"a mean of {mean:g} needs {wanted} stop ids of {vocab_size:,}; {MOST_STOP_IDS} are allowed, so "
        f"one stop id has a logit bias of {bias:.2f}"
    )
