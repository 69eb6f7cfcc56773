"""Completions that wait at the worker, and those of new requests, which pass them."""

from collections.abc import Callable

import pytest

from titopool.slots import MAX_NEW, SlotTable
from workers.serving.slots import BUNCH_STEPS, KEEP_S, NEW_STEPS, EngineSlots, JobSlots

NUM_SLOTS, NUM_PLACES = 16, 15


class Worker:
    """A worker's slots beside an engine; time passes as a test says."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.now = 0.0
        self.table: SlotTable[int] = SlotTable()
        self.planned: list[tuple[float, Callable[[], None]]] = []
        self.slots = EngineSlots(
            lambda: self.table.num_running, lambda: self.now,
            lambda seconds, call: self.planned.append((self.now + seconds, call)),
        )  # fmt: skip
        self.slots.num_slots = num_slots
        self.num_jobs = 0
        self.told: list[int] = []

    def job(self, num: int = 1, *, is_new: bool = False) -> JobSlots:
        key = self.num_jobs = self.num_jobs + 1
        return JobSlots(
            self.slots, self.table, key, num, lambda num_ended: self.told.append(key), is_new=is_new
        )

    def send(self, number: int, num: int = 1, *, is_new: bool = False) -> list[JobSlots]:
        sent = [self.job(num, is_new=is_new) for _ in range(number)]
        for one in sent:
            one.grant(num)
        return sent

    def end(self, jobs: list[JobSlots], num_steps: int = 1) -> None:
        """One completion of each ends after so many steps of a second."""
        for one in jobs:
            one.give_back(num_steps, float(num_steps))
            if not one.progress.num_left:
                one.leave()


def num_started(jobs: list[JobSlots]) -> int:
    return sum(one.progress.started for one in jobs)


def test_numbers_of_a_job_only_grow_and_none_exceeds_the_one_before():
    table: SlotTable[str] = SlotTable()
    table.add("a", 5)
    table.advance("a", granted=9, started=3, ended=4)
    assert (table["a"].granted, table["a"].started, table["a"].ended) == (5, 3, 3)
    # A late message.
    table.advance("a", granted=2, started=1, ended=1)
    assert (table["a"].granted, table["a"].started, table["a"].ended) == (5, 3, 3)
    assert (table.num_held, table.num_running) == (2, 0)
    table.remove("a")
    assert (table.num_held, table.num_running) == (0, 0)


def test_what_is_held_leaves_the_kept_slots_free():
    worker = Worker()
    running, held = worker.send(NUM_PLACES), worker.send(4)
    assert (num_started(running), num_started(held)) == (NUM_PLACES, 0)
    # A new request passes them, and what it leaves is no slot for them.
    new = worker.send(1, is_new=True)
    assert num_started(new) == 1
    worker.end(new)
    assert num_started(held) == 0
    worker.now = 20
    worker.end(running[:2], num_steps=20)
    assert [one.progress.started for one in held] == [1, 1, 0, 0]
    # One that is aborted while it waits makes room for nobody.
    held[2].leave()
    assert num_started(held) == 2
    worker.end(running[2:3], num_steps=20)
    assert held[3].progress.started == 1


def test_a_group_begins_with_what_is_free_and_its_slots_are_used_one_by_one():
    worker = Worker()
    worker.send(1, NUM_PLACES - 3)
    (group,), (behind,) = worker.send(1, 8), worker.send(1)
    assert (group.progress.started, behind.progress.started) == (3, 0)
    for number in range(1, 6):
        worker.now += 20
        worker.end([group], num_steps=20)
        assert (group.progress.started, behind.progress.started) == (3 + number, 0)
    worker.now += 20
    worker.end([group], num_steps=20)
    assert behind.progress.started == 1


def test_the_front_end_learns_of_starts_unless_a_new_request_starts_at_once():
    worker = Worker(num_slots=4)
    worker.send(1, is_new=True)
    assert worker.told == []
    # It may take a job of a request that has begun for one that waits.
    running = worker.send(3)
    assert worker.told == [2, 3, 4]
    (held,) = worker.send(1)
    worker.told.clear()
    worker.end(running[:1], num_steps=20)
    assert worker.told == [held.key, running[0].key]


def test_all_jobs_end_together_and_the_next_ones_leave_the_kept_slots_free():
    worker = Worker()
    running = worker.send(NUM_PLACES)
    for _ in range(3):
        held = worker.send(NUM_PLACES + 2)
        worker.now += 20
        worker.end(running, num_steps=20)
        assert worker.table.num_running == NUM_PLACES
        running = [one for one in held if one.progress.started]
        for one in held:
            if not one.progress.started:
                one.leave()


def test_while_slots_become_free_in_each_step_the_engine_gets_what_ends_within_two_steps():
    worker = Worker()
    running = worker.send(NUM_PLACES)
    for number in range(20):
        worker.now += 1
        worker.end([running.pop(0)], num_steps=min(NUM_PLACES, number + 1))
        running += worker.send(1)
    held = worker.send(3)
    assert worker.table.num_running == NUM_PLACES + 2
    assert [one.progress.started for one in held] == [1, 1, 0]
    assert worker.slots.num_wanted_ahead == 4
    # No completion has ended for longer than that.
    worker.now += 20
    assert worker.slots.num_wanted_ahead == 0
    worker.end([running.pop(0) for _ in range(2)], num_steps=20)
    assert num_started(held) == 2


def test_completions_begin_together_where_a_begin_makes_a_step_dear():
    worker = Worker(num_slots=64)
    worker.slots.bunches = True
    running, held = worker.send(63), worker.send(30)
    worker.now = 20
    worker.end([running.pop()], num_steps=20)
    assert num_started(held) == 1
    worker.now = 21
    worker.end([running.pop() for _ in range(3)], num_steps=20)
    worker.now = 22
    worker.end([running.pop()], num_steps=20)
    # A new request does not wait.
    assert num_started(worker.send(1, is_new=True)) == 1
    ((at, start),) = worker.planned
    assert (num_started(held), at) == (1, 20 + BUNCH_STEPS)
    worker.now = at
    start()
    # One slot is the new request's.
    assert num_started(held) == 4
    worker.now += 1
    # An eighth of the slots is enough.
    worker.end([running.pop() for _ in range(8)], num_steps=20)
    assert num_started(held) == 12
    # The engine is idle.
    worker.end([*running, *held[:12]], num_steps=20)
    assert num_started(held) == 30


def test_new_requests_pass_what_is_held_until_they_have_half_of_the_slots():
    worker = Worker()
    worker.send(NUM_PLACES)
    held = worker.send(2)
    new = worker.send(NUM_SLOTS, is_new=True)
    assert num_started(new) == NUM_SLOTS // 2 + 1
    assert num_started(held) == 0


def test_a_wide_new_request_passes_with_a_part_of_it():
    worker = Worker()
    worker.send(NUM_PLACES)
    held = worker.send(1)
    (wide,) = worker.send(1, 3 * NUM_SLOTS, is_new=True)
    assert (wide.progress.started, num_started(held)) == (MAX_NEW, 0)


def test_slots_that_new_requests_had_at_once_are_kept_for_a_while():
    worker = Worker(num_slots=64)
    running = worker.send(63)
    held = worker.send(20)
    new = worker.send(4, is_new=True)
    worker.end(new)
    worker.end(running[:4], num_steps=20)
    # One is always kept.
    assert num_started(held) == 1
    # Nothing else ends.
    worker.now += 2 * KEEP_S
    worker.slots.fill()
    assert num_started(held) == 4


def test_a_job_that_passed_is_an_ordinary_one_after_a_while():
    worker = Worker()
    (running,) = worker.send(1, NUM_PLACES)
    worker.send(1)
    worker.send(NUM_SLOTS // 2 + 1, is_new=True)
    (last,) = worker.send(1, is_new=True)
    assert last.progress.started == 0
    worker.end([running], num_steps=1)
    worker.now += NEW_STEPS + 1
    worker.end([running], num_steps=1)
    assert num_started(worker.send(1, is_new=True)) == 1


@pytest.mark.parametrize("num", [NUM_PLACES + 1, 3 * NUM_SLOTS])
def test_an_idle_engine_gets_all_but_the_kept_slots_of_a_wide_job(num):
    worker = Worker()
    assert num_started(worker.send(1, num)) == NUM_PLACES
    assert num_started(Worker(num_slots=1).send(1, num)) == 1


def test_a_suspect_starts_without_a_slot():
    worker = Worker(num_slots=1)
    worker.send(2)
    suspect = worker.job(5)
    suspect.grant_apart()
    assert (suspect.progress.started, suspect.progress.num_held) == (1, 4)
