"""Who waits for memory of a front end: none for ever, and narrow requests not for wide ones."""

import gevent
import pytest

from app.http.budget import Budget, Reservation
from titopool.errors import QueueFull

MIB = 2**20
LIMIT = 64 * MIB


def here() -> None:
    """A client that has not gone."""


def answered(one: Reservation, bound: int, took_s: float = 0.01) -> None:
    """A request from its wait for results until it is answered."""
    one.expect(bound, 5, here)
    gevent.sleep(took_s)
    one.settle()
    one.release()


def all_end(*greenlets: gevent.Greenlet) -> None:
    gevent.joinall(greenlets, timeout=5)
    for one in greenlets:
        assert one.ready()
        one.get()


def test_bodies_that_fill_the_budget_do_not_wait_for_each_other():
    budget = Budget(LIMIT)
    requests = [Reservation(budget) for _ in range(7)]
    for one in requests:
        one.take(8 * MIB)
    all_end(*(gevent.spawn(answered, one, 10 * MIB) for one in requests))
    assert (budget.taken, budget.passing_bytes, len(budget.running)) == (0, 0, 0)


def test_a_narrow_request_passes_a_wide_one_that_waits_and_does_not_starve_it():
    budget = Budget(LIMIT)
    wide = [gevent.spawn(answered, Reservation(budget), 2**30, 0.2) for _ in range(4)]
    gevent.sleep(0.05)
    assert len(budget.queue) == 1
    narrow = [Reservation(budget) for _ in range(5)]
    for one in narrow[:4]:
        one.expect(2 * MIB, 0, here)
    # What may pass is taken.
    with pytest.raises(QueueFull):
        narrow[4].expect(2 * MIB, 0, here)
    # The wide one does not need theirs.
    all_end(*wide)
    for one in narrow:
        one.release()
    assert (budget.taken, budget.passing_bytes) == (0, 0)


def test_a_stream_s_next_chunk_is_taken_although_nothing_is_free():
    budget = Budget(LIMIT)
    stream, other = Reservation(budget), Reservation(budget)
    stream.take(2 * MIB)
    other.take(LIMIT - LIMIT // 8 - 2 * MIB)
    for _ in range(1000):
        assert stream.receive(600) is None
        assert stream.receive(-600) is None
    # Unless nobody reads them.
    assert isinstance(stream.receive(100_000), QueueFull)
