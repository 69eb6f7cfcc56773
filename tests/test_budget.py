"""What a request expects of results, and who waits for memory of a front end: none for ever, and narrow
requests not for wide ones."""

import gevent
import msgspec
import numpy as np
import pytest

from app.generation import Prompt, bounds_of_results
from app.http.budget import Budget, Reservation
from app.pool.request import COMPLETION_BYTES
from tests.pools import FACTS
from titopool.errors import QueueFull
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import Completed, Completion, RoutedExperts, SamplingMask

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
    # The loop's time is that of its last turn, perhaps before the tests of other modules.
    gevent.get_hub().loop.update_now()
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


def test_routed_experts_and_masks_are_expected_with_the_tokens():
    num_prompt, num_tokens, start, top_k = 40, 50, 10, 3
    facts = msgspec.structs.replace(FACTS, routed_expert_bytes=6, has_sampling_masks=True)
    options = SamplingOptions(
        n=2, max_tokens=num_tokens, top_k=top_k, routed_experts_prompt_start=start
    )
    ids, num_rows = np.ones(num_tokens, np.int32).tobytes(), num_prompt + num_tokens - 1 - start
    experts = RoutedExperts(bytes(num_rows * 6), (num_rows, 3, 2), "uint8", start)
    mask = SamplingMask(ids * top_k, ids)
    one = Completion(ids, "stop", None, [], routed_experts=experts, sampling_mask=mask)
    widest = Completed(1, 1, [one, one], 0)
    prompt = Prompt(np.ones(num_prompt, np.int32), "prompts[0]")
    (bound,) = bounds_of_results([prompt], options, facts)
    assert bound == widest.num_bytes + 2 * COMPLETION_BYTES
    # Routes that do not return them.
    plain = msgspec.structs.replace(options, routed_experts_prompt_start=None)
    (without,) = bounds_of_results([prompt], plain, facts)
    assert without == 2 * (COMPLETION_BYTES + len(ids))
