"""Names for the prefixes of prompts: chained hashes of blocks of tokens.

Each digest is over the one before it and the ids of its block, so that it stands for all
tokens up to the end of the block. Two prompts share a prefix exactly where their digests
agree, in any process: blake2b has no seed of its own.
"""

from hashlib import blake2b

from titopool.messages import Job

# A multiple of vLLM's blocks (16 tokens, mostly), and small beside the prefixes that matter.
BLOCK_TOKENS = 64
DIGEST_BYTES = 8
_BLOCK_BYTES = 4 * BLOCK_TOKENS


def chain_seed(cache_salt: str | None) -> bytes:
    """What stands before the first block: all that must be equal besides the ids.

    The engine shares no blocks between salts. Images of a prompt belong here as well.
    """
    return blake2b((cache_salt or "").encode(), digest_size=DIGEST_BYTES).digest()


def block_hashes(token_ids: bytes, previous: bytes) -> bytes:
    """One digest for each full block of `token_ids`, after one another.

    Args:
        token_ids: int32, little-endian.
        previous: the digest of the block before, or `chain_seed`.
    """
    digests = []
    for start in range(0, len(token_ids) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        block = token_ids[start : start + _BLOCK_BYTES]
        previous = blake2b(previous + block, digest_size=DIGEST_BYTES).digest()
        digests.append(previous)
    return b"".join(digests)


def prompt_hashes(token_ids: bytes, cache_salt: str | None) -> bytes:
    """The digests of a prompt's full blocks."""
    return block_hashes(token_ids, chain_seed(cache_salt))


def completion_hashes(job: Job, completion_ids: bytes) -> bytes:
    """The digests that follow those of `job.prefix` in prompt and completion together."""
    assert job.prefix is not None
    num_blocks = len(job.prefix) // DIGEST_BYTES
    rest = job.prompt_token_ids[num_blocks * _BLOCK_BYTES :] + completion_ids
    return block_hashes(rest, job.prefix[-DIGEST_BYTES:] or chain_seed(job.cache_salt))
