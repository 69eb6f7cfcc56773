"""What a worker's cache holds, as far as this front end knows."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from titopool.wire.prefixes import BLOCK_TOKENS, DIGEST_BYTES


class PrefixIndex:
    """Digests of blocks, a limited number; the least recently used go first.

    Digests are integers here, which are cheaper to keep than bytes.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[int, None] = OrderedDict()
        self._max_blocks = 0

    def resize(self, num_cache_tokens: int) -> None:
        """Sets how many tokens the worker caches."""
        self._max_blocks = num_cache_tokens // BLOCK_TOKENS

    def clear(self) -> None:
        self._digests.clear()

    def record(self, digests: Sequence[int]) -> None:
        """Adds whole chains of digests, each from its first block on."""
        # Last first: so no block is older than the one behind it, as in vLLM's cache, and the
        # blocks of a chain that are here are its first ones.
        for digest in reversed(digests):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)

    def holds(self, digest: int) -> bool:
        """Whether the block is here, and so all before it."""
        return digest in self._digests

    def num_found(self, digests: Sequence[int]) -> int:
        """How many of a prompt's blocks are here."""
        known = self._digests
        if not digests or digests[0] not in known:
            return 0
        return bisect_left(digests, True, key=lambda digest: digest not in known)


def as_integers(prefix: bytes | None) -> Sequence[int]:
    """The digests of `titopool.wire.prefixes`, 8 bytes each, as integers; bytes behind them are none."""
    if not prefix:
        return ()
    whole = len(prefix) // DIGEST_BYTES * DIGEST_BYTES
    return memoryview(prefix)[:whole].cast("Q").tolist()
