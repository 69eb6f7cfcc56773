"""Jobs that were sent ahead wait at the worker, and those of new requests pass them."""

from collections.abc import Callable

import pytest

from workers.serving.places import Place, Places

NUM_SLOTS, NUM_PLACES = 16, 14


class Worker:
    """A worker's places beside an engine; time passes as a test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running: list[Place] = []
        self.places = Places(
            lambda: sum(one.num_sequences for one in self.running), lambda: self.now
        )

    def send(
        self, number: int, *, num_sequences: int = 1, is_new: bool = False, is_ahead: bool = False
    ) -> list[Place]:
        sent = []
        for _ in range(number):
            num_places = NUM_PLACES if is_ahead else 0
            place = Place(num_sequences, is_new, num_places, NUM_SLOTS, take=lambda: None)
            place.take = self.takes(place)
            if not is_ahead:
                place.take()
            self.places.enter(place)
            sent.append(place)
        return sent

    def takes(self, place: Place) -> Callable[[], None]:
        def take() -> None:
            self.places.begin(place)
            self.running.append(place)

        return take

    def end(self, places: list[Place], num_steps: int = 1) -> None:
        for one in places:
            self.running.remove(one)
            self.places.record_end(one, num_steps)
            self.places.leave(one)


def num_free(places: list[Place]) -> int:
    return sum(one.is_free.is_set() for one in places)


def test_jobs_that_were_sent_ahead_leave_the_kept_slots_free():
    worker = Worker()
    running, ahead = worker.send(NUM_PLACES), worker.send(4, is_ahead=True)
    assert num_free(ahead) == 0
    # A new request passes them, and what it leaves is no place for them.
    new = worker.send(1, is_new=True)
    assert num_free(new) == 1
    worker.end(new)
    assert num_free(ahead) == 0
    worker.now = 20
    worker.end(running[:2], num_steps=20)
    assert [one.is_free.is_set() for one in ahead] == [True, True, False, False]
    # One that is aborted while it waits makes room for nobody.
    worker.places.leave(ahead[2])
    assert num_free(ahead) == 2
    worker.end(running[2:3], num_steps=20)
    assert num_free([ahead[3]]) == 1


def test_all_jobs_end_together_and_the_next_ones_leave_the_kept_slots_free():
    worker = Worker()
    for _ in range(3):
        running, ahead = list(worker.running), worker.send(NUM_PLACES + 2, is_ahead=True)
        worker.now += 20
        worker.end(running, num_steps=20)
        assert len(worker.running) == NUM_PLACES
        for one in ahead:
            if not one.is_free.is_set():
                worker.places.leave(one)


def test_while_slots_become_free_in_each_step_jobs_wait_in_the_engine():
    worker = Worker()
    worker.send(NUM_PLACES)
    for _ in range(NUM_PLACES + 2):
        worker.now += 1
        first = worker.running[0]
        worker.end([first], num_steps=max(1, int(worker.now - first.began)))
        worker.send(1)
    ahead = worker.send(3, is_ahead=True)
    assert num_free(ahead) == 3
    # No job has ended for longer than that.
    worker.now += 3
    assert num_free(worker.send(1, is_ahead=True)) == 0


def test_new_requests_pass_jobs_that_wait_until_they_have_half_of_the_slots():
    worker = Worker()
    new = worker.send(NUM_SLOTS, is_new=True)
    ahead = worker.send(2, is_ahead=True)
    worker.end(new[:1])
    assert num_free(ahead) == 1
    worker.end(new[1:9])
    worker.send(8, is_new=True)
    worker.end(new[9:10])
    assert num_free(ahead) == 2


@pytest.mark.parametrize("num_sequences", [NUM_PLACES + 1, 2 * NUM_SLOTS])
def test_a_job_that_is_larger_than_all_places_runs_alone(num_sequences):
    worker = Worker()
    running = worker.send(1)
    large = worker.send(1, num_sequences=num_sequences, is_ahead=True)
    assert num_free(large) == 0
    worker.end(running)
    assert num_free(large) == 1
