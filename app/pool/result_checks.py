"""Checks that a worker's result fits its job, before a handler reads its arrays."""

from math import prod

import numpy as np

from titopool.wire.messages import Chunk, Completed, Completion, Job, Logprobs

# Of int32 and float32.
ITEM_BYTES = 4


def defect_of(job: Job, result: Completed | Chunk) -> str:
    """What is wrong with a result; "" if nothing is."""
    if isinstance(result, Chunk):
        if not all(0 <= index < job.num_sequences for index, _ in result.pieces):
            return f"expected chunks of {job.num_sequences} completions, got one of another"
        completions = [piece for _, piece in result.pieces]
    else:
        completions = result.completions
        if len(completions) != job.num_sequences:
            return f"expected {job.num_sequences} completions, got {len(completions)}"
        if not completions and len(result.image_ranges) != len(job.images):
            return (
                f"expected the places of {len(job.images)} images, got {len(result.image_ranges)}"
            )
        if result.prompt_logprobs is not None and not _has_whole_items(result.prompt_logprobs):
            return "expected whole numbers of 4 bytes in the prompt's log-probabilities"
    if len(result.prompt_token_ids) % ITEM_BYTES or not all(map(_is_consistent, completions)):
        return "expected arrays of token ids and log-probabilities of matching lengths"
    if not all(map(_is_replay_consistent, completions)):
        return "expected routed experts of their shape and as many masks' ids as counted"
    return ""


def _is_consistent(completion: Completion) -> bool:
    num_bytes, packed = len(completion.token_ids), completion.logprobs
    if num_bytes % ITEM_BYTES or packed is None:
        return num_bytes % ITEM_BYTES == 0
    if not _has_whole_items(packed):
        return False
    if not {len(packed.ranks), len(packed.raw)} <= {0, num_bytes}:
        return False
    if packed.counts:
        counts = np.frombuffer(packed.counts, np.int32)
        if len(packed.counts) != num_bytes or counts.min(initial=0) < 0:
            return False
        num_bytes = ITEM_BYTES * int(counts.sum(dtype=np.int64))
    return len(packed.values) == num_bytes and len(packed.token_ids) in (0, num_bytes)


def _is_replay_consistent(completion: Completion) -> bool:
    experts, mask = completion.routed_experts, completion.sampling_mask
    if experts is not None:
        num_bytes = prod(experts.shape) * np.dtype(experts.dtype).itemsize
        if len(experts.data) != num_bytes:
            return False
    if mask is None:
        return True
    if len(mask.counts) % ITEM_BYTES:
        return False
    counts = np.frombuffer(mask.counts, np.int32)
    num_ids = int(counts.sum(dtype=np.int64))
    return counts.min(initial=0) >= 0 and len(mask.token_ids) == num_ids * ITEM_BYTES


def _has_whole_items(packed: Logprobs) -> bool:
    arrays = (packed.values, packed.token_ids, packed.counts, packed.ranks)
    return not any(len(array) % ITEM_BYTES for array in arrays)
