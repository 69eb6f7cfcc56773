"""Digests of prompts' prefixes: chained hashes of blocks of tokens.

Each digest is over the previous digest and the ids of its block, so it identifies all tokens up to
the end of the block. Two prompts have equal digests exactly as far as they share a prefix, in every
process, because blake2b is unseeded. vLLM's prefix cache chains its block hashes in the same way.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np

from titopool.wire.messages import ImageFacts, Job

# A multiple of vLLM's block size (usually 16 tokens), and small compared to useful prefixes.
BLOCK_TOKENS = 64
DIGEST_BYTES = 8
_BLOCK_BYTES = 4 * BLOCK_TOKENS


def chain_seed(cache_salt: str | None) -> bytes:
    """The digest before the first block. The engine shares no blocks between salts."""
    return blake2b((cache_salt or "").encode(), digest_size=DIGEST_BYTES).digest()


def block_hashes(
    token_ids: bytes,
    previous: bytes,
    marks: Mapping[int, bytes] | None = None,
    first_block: int = 0,
) -> bytes:
    """One digest for each full block of `token_ids`, concatenated.

    Args:
        token_ids: int32, little-endian.
        previous: the digest of the previous block, or `chain_seed`.
        marks: by block number: bytes that must also be equal from this block on.
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
    """The digests of a prompt's full blocks.

    Args:
        images: the digests of the prompt's images.
    """
    marks = image_marks(token_ids, images, facts)
    return block_hashes(token_ids, chain_seed(cache_salt), marks)


def image_marks(
    token_ids: bytes, images: Sequence[bytes], facts: ImageFacts | None
) -> dict[int, bytes]:
    """Each image's digest, by the number of the block where its placeholders begin.

    Assumes that the n-th run of placeholders belongs to the n-th image. Then a conversation that
    gains an image keeps the digests of its earlier turns. A model that cuts an image into tiles has
    several runs for an image; there only the digests before the first image are kept.
    """
    if not images or facts is None:
        return {}
    ids = np.frombuffer(token_ids, np.int32)
    is_placeholder = np.isin(ids, facts.placeholder_ids)
    begins = np.flatnonzero(is_placeholder & ~np.append(False, is_placeholder[:-1]))
    marks: dict[int, bytes] = {}
    for number, digest in enumerate(images):
        block = int(begins[min(number, len(begins) - 1)]) // BLOCK_TOKENS if len(begins) else 0
        marks[block] = marks.get(block, b"") + digest
    return marks


def completion_hashes(job: Job, completion_ids: bytes, facts: ImageFacts | None = None) -> bytes:
    """The digests of prompt and completion together that follow `job.prefix`."""
    assert job.prefix is not None
    num_blocks = len(job.prefix) // DIGEST_BYTES
    rest = job.prompt_token_ids[num_blocks * _BLOCK_BYTES :] + completion_ids
    previous = job.prefix[-DIGEST_BYTES:] or chain_seed(job.cache_salt)
    marks = image_marks(job.prompt_token_ids, [image.digest for image in job.images], facts)
    return block_hashes(rest, previous, marks, num_blocks)
