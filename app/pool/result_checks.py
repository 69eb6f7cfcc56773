"""Whether what a worker says of a job can be an answer to it, before a handler works with it."""

import numpy as np

from titopool.wire.messages import Chunk, Completed, Completion, Job, Logprobs

# Of int32 and float32.
ITEM_BYTES = 4


def misfit(job: Job, result: Completed | Chunk) -> str:
    """What is wrong with a result; "" if nothing is."""
    if isinstance(result, Chunk):
        if not all(0 <= index < job.num_sequences for index, _ in result.pieces):
            return f"expected chunks of {job.num_sequences} completions, got one of another"
        completions = [piece for _, piece in result.pieces]
    else:
        completions = result.completions
        if len(completions) != job.num_sequences:
            return f"expected {job.num_sequences} completions, got {len(completions)}"
        if result.prompt_logprobs is not None and not _are_whole(result.prompt_logprobs):
            return "expected log-probabilities of the prompt in whole numbers, got others"
    if len(result.prompt_token_ids) % ITEM_BYTES or not all(map(_is_whole, completions)):
        return "expected arrays of token ids and log-probabilities that fit, got others"
    return ""


def _is_whole(completion: Completion) -> bool:
    num_bytes, packed = len(completion.token_ids), completion.logprobs
    if num_bytes % ITEM_BYTES or packed is None:
        return num_bytes % ITEM_BYTES == 0
    if not _are_whole(packed):
        return False
    if packed.counts:
        counts = np.frombuffer(packed.counts, np.int32)
        if len(packed.counts) != num_bytes or counts.min(initial=0) < 0:
            return False
        num_bytes = ITEM_BYTES * int(counts.sum(dtype=np.int64))
    return len(packed.values) == num_bytes and len(packed.token_ids) in (0, num_bytes)


def _are_whole(packed: Logprobs) -> bool:
    arrays = (packed.values, packed.token_ids, packed.counts, packed.ranks)
    return not any(len(array) % ITEM_BYTES for array in arrays)
