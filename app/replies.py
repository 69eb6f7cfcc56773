"""From results to the bytes of an answer, without a Python object for each token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from titopool.messages import Completed, Completion, Logprobs


def generate_reply(
    prompt_ids: Sequence[np.ndarray], results: Sequence[Completed], *, with_logprobs: bool
) -> bytes:
    """The JSON answer of /generate/: prompt-major, the n completions of prompt 0 first.

    `logprobs` and `logprob_token_ids` have the shape [completions][tokens][1 to k + 1], or
    are null; a value that is not finite is null.
    """
    completions = [completion for result in results for completion in result.completions]
    values = ids = None
    if with_logprobs:
        values, ids = [], []
        for completion in completions:
            one = nested_logprobs(completion)
            values.append(one[0])
            ids.append(one[1])
    reply = {
        "prompt_ids": list(prompt_ids),
        "completion_ids": [np.frombuffer(one.token_ids, np.int32) for one in completions],
        "logprobs": values,
        "logprob_token_ids": ids,
        "finish_reasons": [one.finish_reason for one in completions],
        "weight_versions": [one.weight_versions for one in completions],
        "num_cached_tokens": [result.num_cached_tokens for result in results],
    }
    # orjson writes float32 in the fewest digits that read back as the same float32.
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)


def nested_logprobs(completion: Completion) -> tuple[Any, Any]:
    """The log-probabilities and their token ids, each [tokens][entries at that token]."""
    packed = completion.logprobs
    if packed is None:
        return [], []
    values = np.frombuffer(packed.values, np.float32)
    ids = np.frombuffer(packed.token_ids or completion.token_ids, np.int32)
    if not packed.counts:
        return values.reshape(-1, 1), ids.reshape(-1, 1)
    return _split(values, packed), _split(ids, packed)


def _split(array: np.ndarray, packed: Logprobs) -> list[np.ndarray]:
    ends = np.cumsum(np.frombuffer(packed.counts, np.int32))
    return np.split(array, ends[:-1])
