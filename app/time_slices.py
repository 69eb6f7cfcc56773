"""How loops over long lists let the other requests of a front end run."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import gevent
from gevent.lock import Semaphore

Item = TypeVar("Item")

# How long a loop keeps the other greenlets waiting.
SLICE_S = 0.01
# The shortest sleep after which sockets are read and timers run. One of 0 s lets ready greenlets run
# only, and may return a thousand times before.
YIELD_S = 1e-6
# Of the greenlets with long work, how many go on in one turn of the event loop: 64 that each read a
# piece of a body would make it last 0.1 s.
MAX_IN_A_TURN = 4
_turns = Semaphore(MAX_IN_A_TURN)
# A scan of more bytes takes about a slice: msgspec makes no pause, and needs 1 to 2 ms for each MiB.
LONG_BYTES = 2**22
_alone = Semaphore(1)
# Some loops over more take about a slice.
MANY_ITEMS = 8192


def give_way() -> None:
    """Lets other greenlets run: all short ones, and those with long work in turn."""
    with _turns:
        gevent.sleep(YIELD_S)


def give_way_before(num_bytes: int) -> None:
    """Before a scan of so many bytes that makes no pause: of long ones, each turn of the event loop has
    one."""
    if num_bytes > LONG_BYTES:
        with _alone:
            gevent.sleep(YIELD_S)


def give_way_after(num_items: int) -> None:
    """Lets other greenlets run after some loops over so many items, if these took long."""
    if num_items > MANY_ITEMS:
        give_way()


def sharing_time(items: Iterable[Item]) -> Iterator[Item]:
    """`items`; lets other greenlets run every `SLICE_S`, not after the one item of a list. For loops in
    a greenlet only."""
    # Most requests have one prompt.
    return iter(items) if isinstance(items, list) and len(items) <= 1 else _sharing_time(items)


def _sharing_time(items: Iterable[Item]) -> Iterator[Item]:
    ends_s = time.monotonic() + SLICE_S
    for item in items:
        yield item
        if time.monotonic() > ends_s:
            give_way()
            ends_s = time.monotonic() + SLICE_S
