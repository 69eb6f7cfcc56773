"""Names for the prefixes of prompts: chained hashes of blocks of tokens.

Each digest is over the one before it and the ids of its block, so that it stands for all
tokens up to the end of the block. Two prompts share a prefix exactly where their digests
agree, in any process: blake2b has no seed of its own.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np

from titopool.wire.messages import ImageFacts, Job

# A multiple of vLLM's blocks (16 tokens, mostly), and small beside the prefixes that matter.
BLOCK_TOKENS = 64
DIGEST_BYTES = 8
_BLOCK_BYTES = 4 * BLOCK_TOKENS


def chain_seed(cache_salt: str | None) -> bytes:
    """What stands before the first block: the engine shares no blocks between salts."""
    return blake2b((cache_salt or "").encode(), digest_size=DIGEST_BYTES).digest()


def block_hashes(
    token_ids: bytes,
    previous: bytes,
    marks: Mapping[int, bytes] | None = None,
    first_block: int = 0,
) -> bytes:
    """One digest for each full block of `token_ids`, after one another.

    Args:
        token_ids: int32, little-endian.
        previous: the digest of the block before, or `chain_seed`.
        marks: what else must be equal from a block on, by the block's number.
        first_block: the number of the first block.
    """
    digests = []
    starts = range(0, len(token_ids) - _BLOCK_BYTES + 1, _BLOCK_BYTES)
    for number, start in enumerate(starts, first_block):
        block = token_ids[start : start + _BLOCK_BYTES]
        if marks and number in marks:
            block += marks[number]
        previous = blake2b(previous + block, digest_size=DIGEST_BYTES).digest()
        digests.append(previous)
    return b"".join(digests)


def prompt_hashes(
    token_ids: bytes,
    cache_salt: str | None,
    images: Sequence[bytes] = (),
    facts: ImageFacts | None = None,
) -> bytes:
    """The digests of a prompt's full blocks; `images` are the digests of its images."""
    marks = image_marks(token_ids, images, facts)
    return block_hashes(token_ids, chain_seed(cache_salt), marks)


def image_marks(
    token_ids: bytes, images: Sequence[bytes], facts: ImageFacts | None
) -> dict[int, bytes]:
    """Each image's digest at the block where its placeholders begin, as far as that can be told.

    The n-th run of placeholders is taken for the n-th image's. So a conversation that grows by
    an image keeps the digests of its earlier turns with models that have one run for an image;
    with those that cut images into tiles, only those before the first image.
    """
    if not images or facts is None:
        return {}
    ids = np.frombuffer(token_ids, np.int32)
    stands_for_image = np.isin(ids, facts.placeholder_ids)
    begins = np.flatnonzero(stands_for_image & ~np.append(False, stands_for_image[:-1]))
    marks: dict[int, bytes] = {}
    for number, digest in enumerate(images):
        block = int(begins[min(number, len(begins) - 1)]) // BLOCK_TOKENS if len(begins) else 0
        marks[block] = marks.get(block, b"") + digest
    return marks


def completion_hashes(job: Job, completion_ids: bytes, facts: ImageFacts | None = None) -> bytes:
    """The digests that follow those of `job.prefix` in prompt and completion together."""
    assert job.prefix is not None
    num_blocks = len(job.prefix) // DIGEST_BYTES
    rest = job.prompt_token_ids[num_blocks * _BLOCK_BYTES :] + completion_ids
    previous = job.prefix[-DIGEST_BYTES:] or chain_seed(job.cache_salt)
    marks = image_marks(job.prompt_token_ids, [image.digest for image in job.images], facts)
    return block_hashes(rest, previous, marks, num_blocks)
