"""The prefixes that a worker's KV cache holds, as far as this front end knows."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from titopool.wire.prefixes import BLOCK_TOKENS, DIGEST_BYTES


class PrefixIndex:
    """An LRU set of block digests, as large as the worker's cache.

    Digests are integers here, which take less memory than bytes.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[int, None] = OrderedDict()
        self._max_blocks = 0

    def resize(self, num_cache_tokens: int) -> None:
        """Sets how many tokens the worker can cache."""
        self._max_blocks = num_cache_tokens // BLOCK_TOKENS

    def clear(self) -> None:
        self._digests.clear()

    def record(self, digests: Sequence[int]) -> None:
        """Adds a whole chain of digests, from its first block on."""
        # In reverse, so that no block is older than its successor, as in vLLM's cache: what is
        # left of a chain is always its beginning.
        for digest in reversed(digests):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)

    def holds(self, digest: int) -> bool:
        """Whether the worker holds this block, and so every block before it."""
        return digest in self._digests

    def num_found(self, digests: Sequence[int]) -> int:
        """How many blocks of a prompt the worker holds."""
        known = self._digests
        if not digests or digests[0] not in known:
            return 0
        return bisect_left(digests, True, key=lambda digest: digest not in known)


def as_integers(prefix: bytes | None) -> Sequence[int]:
    """Digests as `titopool.wire.prefixes` packs them, 8 bytes each, as integers.

    An incomplete digest at the end is ignored.
    """
    if not prefix:
        return ()
    whole = len(prefix) // DIGEST_BYTES * DIGEST_BYTES
    return memoryview(prefix)[:whole].cast("Q").tolist()
