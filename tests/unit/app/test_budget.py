"""What a request expects of results, and who waits for memory of a front end: none for ever, and narrow
requests not for wide ones."""

import random
from contextlib import suppress

import gevent
import msgspec
import numpy as np
import pytest
from gevent.event import Event
from hypothesis import given, settings
from hypothesis import strategies as st

from app.call.jobs import EXPECTED_TOKENS, Prompt, bounds_of_results
from app.http.budget import Budget, Reservation
from tests.kit.workers.pools import FACTS, pool_of, request_of
from titopool.errors import QueueFull, TitopoolError
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import (
    COMPLETION_BYTES,
    Chunk,
    Completed,
    Completion,
    Logprobs,
    RoutedExperts,
    SamplingMask,
    encode,
)

MIB = 2**20
LIMIT = 64 * MIB


def here() -> None:
    """A client that has not gone."""


def never(error: TitopoolError) -> None:
    raise AssertionError(f"expected that the request goes on, got {error}")


def answered(one: Reservation, bound: int, took_s: float = 0.01) -> None:
    """A request from its wait for results until it is answered."""
    one.expect(bound, 5, here, never)
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
        one.expect(2 * MIB, 0, here, never)
    # What may pass is taken.
    with pytest.raises(QueueFull):
        narrow[4].expect(2 * MIB, 0, here, never)
    # The wide one does not need theirs.
    all_end(*wide)
    for one in narrow:
        one.release()
    assert (budget.taken, budget.passing_bytes) == (0, 0)


def test_narrow_ones_that_come_again_and_again_do_not_starve_a_wide_one():
    """It waited out its time, while thousands of small ones came and went."""
    budget, ended = Budget(LIMIT), Event()

    def go_on(bound: int, took_s: float) -> None:
        while not ended.is_set():
            answered(Reservation(budget), bound, took_s)

    bounds = [MIB * 9 // 10] * 48 + [MIB * 6 // 5] * 4
    # Never many at once.
    loops = [gevent.spawn(go_on, one, 0.01 + num / 2000) for num, one in enumerate(bounds)]
    gevent.sleep(0.1)
    wide = gevent.spawn(answered, Reservation(budget), 16 * MIB)
    wide.join()
    ended.set()
    all_end(wide, *loops)
    assert (budget.taken, budget.passing_bytes) == (0, 0)


def test_an_answer_in_the_place_of_its_results_needs_no_room():
    budget = Budget(LIMIT)
    one, body = Reservation(budget), Reservation(budget)
    one.expect(16 * MIB, 0, here, never)
    assert one.receive(16 * MIB, 16 * MIB) is None
    body.take(40 * MIB)
    # What does not wait goes beyond what others leave.
    body.add(4 * MIB)
    assert one.grow(16 * MIB, 0)
    assert not one.grow(1, 0)


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


def test_of_long_completions_a_part_is_expected():
    """One by one they took the budget at a small part of an engine's slots."""
    prompt = Prompt(np.ones(40, np.int32), "prompts[0]")
    facts = msgspec.structs.replace(FACTS, max_model_len=131_072)
    options = SamplingOptions(n=2, logprobs=1, max_tokens=None)
    (bound,) = bounds_of_results([prompt], options, facts)
    # The id, two entries, a rank and a number.
    assert bound == 2 * (COMPLETION_BYTES + EXPECTED_TOKENS * (4 + 2 * 8 + 8))


def test_the_oldest_takes_what_small_ones_only_expect():
    budget = Budget(LIMIT)
    oldest, body = Running(budget, MIB // 2), Reservation(budget)
    body.take(2 * MIB)
    small = [Running(budget, MIB // 2) for _ in range(107)]
    oldest.receive(30 * MIB)
    assert oldest.error is None
    assert [one.error for one in small] == [None] * 107
    assert budget.taken <= LIMIT - LIMIT // 8
    small[-1].receive(MIB // 4)
    assert small[-1].error is not None


@pytest.mark.parametrize(("letter", "num_bytes"), [("a", 1), ("漢", 2), ("😀", 4)])
def test_a_text_counts_as_it_is_kept_and_twice_in_a_message(letter: str, num_bytes: int):
    plain = Completion(b"", "stop", None, [], letter * 10_000)
    parsed = msgspec.structs.replace(plain, message={"content": plain.text})
    assert 0 <= plain.num_bytes - num_bytes * 10_000 < 100
    assert parsed.num_bytes == 2 * plain.num_bytes


class Running:
    """A request between its wait for results and its end; results that have no room fail it."""

    def __init__(self, budget: Budget, bound: int):
        self.reservation, self.error = Reservation(budget), None
        # No time to wait.
        self.reservation.expect(bound, 0, here, self.fail)

    def fail(self, error: TitopoolError) -> None:
        self.error = error

    def receive(self, num_bytes: int) -> None:
        if self.error is None:
            self.error = self.reservation.receive(num_bytes, num_bytes)

    def end(self) -> None:
        self.reservation.settle()
        self.reservation.release()


def test_of_two_that_get_more_than_they_expected_the_older_ends_well():
    budget = Budget(LIMIT)
    older, younger, narrow = (Running(budget, num * MIB) for num in (60, 60, 1))
    for _ in range(6):
        # Before any handler runs.
        older.receive(9 * MIB)
        younger.receive(9 * MIB)
    assert older.error is None
    assert narrow.error is None
    assert isinstance(younger.error, QueueFull)
    assert budget.taken <= LIMIT
    for one in (older, younger, narrow):
        one.end()
    assert (budget.taken, budget.taken_by_small, len(budget.running)) == (0, 0, 0)


def test_one_that_keeps_to_what_it_expected_gives_way_to_the_oldest_only():
    budget = Budget(LIMIT)
    oldest, modest, wide = (Running(budget, 60 * MIB) for _ in range(3))
    modest.receive(15 * MIB)
    wide.receive(30 * MIB)
    # Not the oldest: it fails before one that keeps to its share.
    assert wide.error is not None
    assert modest.error is None
    oldest.receive(30 * MIB)
    assert oldest.error is None
    assert modest.error is None
    oldest.receive(25 * MIB)
    assert oldest.error is None
    assert isinstance(modest.error, QueueFull)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_aborted_job_ends_although_its_result_has_no_room(is_streamed: bool):
    budget, pool, request = Budget(LIMIT), pool_of("a"), request_of(*[100] * 8)
    one, body = Reservation(budget), Reservation(budget)
    request.jobs = [msgspec.structs.replace(job, is_streamed=is_streamed) for job in request.jobs]
    request.count_bytes = one.receive
    one.expect(20 * MIB, 0, here, never)
    pool.submit(request)
    pool.assign()
    ids = np.ones(7 * MIB // 4, np.int32).tobytes()
    for job_id in (1, 2, 3):
        pool.on_results("a", [Completed(job_id, 1, [Completion(ids, "stop", None, [])], 0)])
    body.take(LIMIT - LIMIT // 8 - one.taken)
    pool.end_waiting(None)
    assert request.is_done == is_streamed
    pool.on_results("a", [Completed(4, 1, [Completion(b"", "abort", None, [])], 0)])
    assert request.is_done
    # A stream whose client reads nothing.
    assert isinstance(request.error, QueueFull) == is_streamed


def test_nobody_gives_way_where_that_is_not_enough():
    budget = Budget(LIMIT)
    body = Reservation(budget)
    body.take(30 * MIB)
    oldest, modest = (Running(budget, 10 * MIB) for _ in range(2))
    modest.receive(9 * MIB)
    oldest.receive(30 * MIB)
    assert isinstance(oldest.error, QueueFull)
    assert modest.error is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-100, 100), st.lists(st.integers(1, 20), min_size=1, max_size=6)),
        min_size=1, max_size=12,
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_whatever_comes_the_oldest_that_runs_ends_well(
    drawn: list[tuple[int, list[int]]], chance: random.Random
):
    """`drawn`: for each request by how much what is expected exceeds its results, and their sizes in MiB."""
    budget, running, num_well = Budget(LIMIT), list[Running](), 0
    waiting = [(more, sizes) for more, sizes in drawn if sum(sizes) <= LIMIT // MIB * 7 // 8]
    left: dict[Running, list[int]] = {}
    num_all = len(waiting)
    while waiting or running:
        if waiting and chance.random() < 0.5:
            more, sizes = waiting[0]
            with suppress(QueueFull):
                one = Running(budget, max(1, sum(sizes) + more) * MIB)
                left[one] = waiting.pop(0)[1].copy()
                running.append(one)
        if running:
            one = chance.choice(running)
            one.receive(left[one].pop() * MIB)
            assert budget.taken <= LIMIT
            assert running[0].error is None
        for one in list(running):
            if one.error is not None or not left[one]:
                num_well += one.error is None
                running.remove(one)
                one.end()
    assert num_well or not num_all
    assert (budget.taken, budget.taken_by_small) == (0, 0)


def test_chunks_that_wait_are_encoded_and_count_until_they_are_written():
    counted = [0]

    def count(num_bytes: int, bound: int = 0) -> None:
        counted[0] += num_bytes

    request = request_of(100)
    request.count_bytes = count
    ids, logprobs = np.ones(64, np.int32).tobytes(), Logprobs(np.ones(64, np.float32).tobytes())
    sent = [
        Chunk(1, 1, [(0, Completion(ids, "", logprobs, [(number, 0)]))]) for number in range(100)
    ]
    for chunk in sent:
        request.add_chunk(0, chunk)
    all_bytes, taken = counted[0], []
    assert all_bytes < sum(chunk.num_bytes for chunk in sent) * 2 // 3
    while chunks := request.take_chunks():
        taken += [chunk for _, chunk in chunks]
        assert counted[0] >= sum(len(encode(chunk)) for _, chunk in chunks)
        assert len(chunks) < 50
    assert taken == sent
    assert counted[0] == 0
