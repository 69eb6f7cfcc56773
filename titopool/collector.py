"""Python's garbage collector. A collection visits all objects since the last freeze: 0.2 s with torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Within the block no garbage is collected, in any thread.

    Imports make so many objects that collections take 2 of the 7 s of vLLM's. Of two blocks at the
    same time, the first that ends turns the collector on: one that is left off would stay off.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
