"""How loops over long lists let the other requests of a front end run."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import gevent

Item = TypeVar("Item")

# How long a loop keeps the other greenlets waiting.
SLICE_S = 0.01
# The shortest sleep after which sockets are read and timers run. One of 0 s lets ready greenlets run
# only, and may return a thousand times before.
YIELD_S = 1e-6


def sharing_time(items: Iterable[Item]) -> Iterator[Item]:
    """`items`; lets other greenlets run every `SLICE_S`. For loops in a greenlet only."""
    ends_s = time.monotonic() + SLICE_S
    for item in items:
        yield item
        if time.monotonic() > ends_s:
            gevent.sleep(YIELD_S)
            ends_s = time.monotonic() + SLICE_S
