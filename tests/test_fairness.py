"""Requests have turns, and new ones find a free slot: pools beside simulated engines, in steps."""

import itertools
import random
import time
from collections import deque
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.pool.records import OpenJob, WaitingJobs
from app.pool.request import Request
from app.pool.state import Pool
from tests.test_pool import FACTS, beat
from titopool.wire.messages import Completed, Completion, Job, JobProgress, Load
from workers.serving.places import Place, Places

NUM_SLOTS = 256
COMPLETION = Completion(b"", "stop", None, [])


def request_of(
    first_id: int, num_jobs: int, num_tokens: int = 1000, n: int = 1, key: str = "", weight: int = 1
) -> Request:
    ids = range(first_id, first_id + num_jobs)
    jobs = [Job(one, 1, b"", n, num_tokens, b"", key_name=key) for one in ids]
    return Request(jobs, weight=weight)


def append(waiting: WaitingJobs, request: Request) -> None:
    for index, job in enumerate(request.jobs):
        waiting.append(OpenJob(job, request, index))


def take(waiting: WaitingJobs, number: int) -> list[int]:
    """Takes jobs; returns the ids of their requests' first jobs."""
    taken = []
    for _ in range(number):
        open_job = waiting.first
        waiting.take(open_job)
        taken.append(open_job.request.jobs[0].job_id)
    return taken


# ---- turns -------------------------------------------------------------------------------


def test_requests_are_served_in_turn_by_tokens():
    waiting = WaitingJobs()
    append(waiting, request_of(1000, 500, num_tokens=10))
    append(waiting, request_of(2000, 500, num_tokens=40))
    taken = take(waiting, 250)
    assert taken.count(1000) == pytest.approx(200, abs=2)


def test_a_new_request_waits_for_one_job_of_each_other_request():
    waiting = WaitingJobs()
    for first_id in (1000, 2000, 3000):
        append(waiting, request_of(first_id, 100, num_tokens=first_id))
    take(waiting, 50)
    append(waiting, request_of(1, 1, num_tokens=10**6))
    assert 1 in take(waiting, 4)
    assert len(waiting) == 247


def test_new_requests_do_not_starve_an_old_one():
    waiting = WaitingJobs()
    append(waiting, request_of(1000, 100))
    for number in range(60):
        append(waiting, request_of(number, 1))
        append(waiting, request_of(100 + number, 1))
        take(waiting, 2)
    # Between two of its turns are those that came before: two at first, then ever more.
    assert sum(one.request.jobs[0].job_id == 1000 for one in waiting) <= 90


def test_a_request_that_comes_late_gets_no_credit():
    waiting = WaitingJobs()
    append(waiting, request_of(1000, 100))
    take(waiting, 50)
    append(waiting, request_of(2000, 100))
    assert take(waiting, 20).count(2000) == pytest.approx(10, abs=1)


def test_the_queue_is_the_same_whatever_is_removed():
    rng, waiting = random.Random(1), WaitingJobs()
    inside: dict[int, Request] = {}
    for number in range(500):
        choice = rng.random()
        if choice < 0.4:
            num_jobs, num_tokens = rng.randint(1, 5), rng.randint(1, 50)
            request = request_of(10 * number, num_jobs, num_tokens, key=rng.choice("abc"))
            append(waiting, request)
            inside |= {job.job_id: request for job in request.jobs}
        elif choice < 0.6 and inside:
            assert waiting.remove(rng.choice(list(inside))).job.job_id in inside  # type: ignore[union-attr]
        elif choice < 0.7 and inside:
            one = waiting.remove(next(iter(inside)))
            assert one is not None
            waiting.prepend([one])
        elif inside:
            # Policies do not always take the first.
            waiting.take(rng.choice(list(waiting)[:3]))
        inside = {one.job.job_id: one.request for one in waiting}
        assert len(waiting) == len(inside)
        assert not waiting or next(iter(inside)) == waiting.first.job.job_id
    waiting.remove_all()
    assert (len(waiting), list(waiting), waiting.first_new) == (0, [], None)


def test_a_turn_takes_as_long_however_much_waits():
    def seconds(num_jobs: int, num_requests: int) -> float:
        waiting = WaitingJobs()
        for number in range(num_requests):
            append(waiting, request_of(number * num_jobs, num_jobs))
        begin = time.perf_counter()
        take(waiting, 500)
        return time.perf_counter() - begin

    few = min(seconds(250, 2) for _ in range(3))
    for sizes in ((65_536, 1), (2, 16_000)):
        assert min(seconds(*sizes) for _ in range(2)) < 20 * few


# ---- keys --------------------------------------------------------------------------------


@st.composite
def backlogs(draw: st.DrawFn) -> dict[str, list[Request]]:
    """Requests of up to four keys, more than `test_keys_share_…` takes."""
    ids = itertools.count(1, 1000)
    return {
        name: [
            request_of(next(ids), draw(num_jobs), draw(num_tokens), key=name, weight=weight)
            for _ in range(draw(num_requests))
        ]
        for name in "abcd"[: draw(st.integers(2, 4))]
        for weight in [draw(st.integers(1, 9))]
        for num_requests in [st.integers(1, 20)]
        for num_jobs, num_tokens in [(st.integers(1, 50), st.integers(1, 5000))]
    }


@given(backlogs(), st.randoms(use_true_random=False))
def test_keys_share_tokens_by_weight_however_many_requests_each_has(backlogs, rng):
    waiting = WaitingJobs()
    requests = [request for one in backlogs.values() for request in one]
    rng.shuffle(requests)
    for request in requests:
        append(waiting, request)
    left = {name: sum(len(one.jobs) for one in sent) for name, sent in backlogs.items()}
    had = dict.fromkeys(backlogs, 0.0)
    while all(left.values()):
        open_job = waiting.first
        waiting.take(open_job)
        name = open_job.job.key_name
        left[name] -= 1
        had[name] += open_job.job.num_tokens / open_job.request.weight
        # Keys are at most a job apart: of each the largest.
        largest = {
            name: max(job.num_tokens / one.weight for one in sent for job in one.jobs)
            for name, sent in backlogs.items()
        }
        for one, other in itertools.combinations(had, 2):
            assert abs(had[one] - had[other]) <= largest[one] + largest[other] + 1e-6


def test_a_key_that_comes_late_or_again_has_neither_credit_nor_debt():
    waiting = WaitingJobs()
    append(waiting, request_of(1000, 900, key="a"))
    for first_id in (10_000, 20_000):
        take(waiting, 100)
        append(waiting, request_of(first_id, 100, key="b", weight=2))
        assert take(waiting, 90).count(first_id) == pytest.approx(60, abs=2)
        for one in [one for one in waiting if one.job.key_name == "b"]:
            waiting.remove(one.job.job_id)


def test_a_new_weight_holds_for_new_requests():
    waiting = WaitingJobs()
    append(waiting, request_of(1000, 500, key="a"))
    for first_id, weight in ((10_000, 1), (20_000, 4)):
        append(waiting, request_of(first_id, 80, key="b", weight=weight))
        taken = take(waiting, 100)
        assert taken.count(first_id) == pytest.approx(100 * weight / (weight + 1), abs=2)
        take(waiting, 80)


# ---- slots -------------------------------------------------------------------------------


class Engines:
    """Front ends' pools, and engines that start waiting sequences first come, first served.

    Jobs that were sent ahead wait before the engine, in the worker's own `Places`.
    """

    def __init__(self, num_workers: int, num_pools: int, lengths: tuple[int, int]):
        """`lengths`: of completions, in steps."""
        self.rng, self.lengths, self.step_number = random.Random(0), lengths, 0
        self.pools = [Pool(no_worker_timeout_s=10) for _ in range(num_pools)]
        self.names = [f"w{index}" for index in range(num_workers)]
        self.queues: dict[str, deque[tuple[Pool, Job]]] = {name: deque() for name in self.names}
        self.running: dict[str, list[tuple[int, Pool, Job]]] = {name: [] for name in self.names}
        self.places = {name: Places(partial(self.num_in_engine, name)) for name in self.names}
        self.places_of: dict[int, Place] = {}
        # By job id: the steps of its submission and its start.
        self.submitted: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.num_idle = 0
        facts = msgspec.structs.replace(FACTS, max_num_seqs=NUM_SLOTS)
        for pool in self.pools:
            for name in self.names:
                pool.add_worker(name, now=0)
                one = msgspec.structs.replace(beat(name), facts=facts, num_front_ends=num_pools)
                pool.on_heartbeat(name, one, now=0)

    def submit(self, pool: Pool, request: Request) -> None:
        pool.submit(request)
        self.submitted |= {job.job_id: self.step_number for job in request.jobs}

    def step(self) -> None:
        self.step_number += 1
        # Reports of load come several times within a step.
        for _ in range(2):
            for pool in self.pools:
                for worker, jobs, _, num_places, is_new in pool.assign():
                    self.send(pool, worker.endpoint, jobs, num_places, is_new=is_new)
            self.report()
        for name in self.names:
            self.step_of(name)

    def num_in_engine(self, name: str) -> int:
        return len(self.queues[name]) + len(self.running[name])

    def send(
        self, pool: Pool, name: str, jobs: list[Job], num_places: int, *, is_new: bool
    ) -> None:
        for job in jobs:
            take = partial(self.start, pool, name, job)
            self.places_of[job.job_id] = Place(1, is_new, num_places, NUM_SLOTS, take)
            if not num_places:
                self.queues[name].append((pool, job))
            self.places[name].enter(self.places_of[job.job_id])

    def start(self, pool: Pool, name: str, job: Job) -> None:
        """Gives the engine a job that was sent ahead."""
        self.queues[name].append((pool, job))
        pool.on_results(name, [JobProgress(job.job_id, 1, has_token=False)])

    def step_of(self, name: str) -> None:
        queue, running = self.queues[name], self.running[name]
        while queue and len(running) < NUM_SLOTS:
            pool, job = queue.popleft()
            self.started[job.job_id] = self.step_number
            running.append((self.step_number + self.rng.randint(*self.lengths), pool, job))
        self.num_idle += NUM_SLOTS - len(running)
        self.running[name] = [one for one in running if one[0] > self.step_number]
        for end, pool, job in running:
            if end <= self.step_number:
                result = Completed(job.job_id, 1, [COMPLETION] * job.num_sequences, 0)
                pool.on_results(name, [result])
                self.places[name].leave(self.places_of.pop(job.job_id))

    def report(self) -> None:
        for name in self.names:
            for pool in self.pools:
                others = [one.workers[name] for one in self.pools if one is not pool]
                num_started = sum(one.num_sequences - one.num_sequences_ahead for one in others)
                pool.on_load(name, Load(num_started, 0))

    def waited(self, job_id: int) -> int:
        """Steps from the submission until the start; an idle engine has 1."""
        return self.started[job_id] - self.submitted[job_id]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_small_request_starts_within_3_steps_beside_one_of_65536_prompts(num_workers):
    engines = Engines(num_workers, num_pools=2, lengths=(50, 250))
    engines.submit(engines.pools[0], request_of(1_000_000, 65_536))
    # All jobs of the batch that begin together have not ended before.
    for _ in range(250):
        engines.step()
    small: list[int] = []
    for number in range(400):
        engines.step()
        for pool in engines.pools if number % 5 == 0 else ():
            small.append(len(small) + 1)
            engines.submit(pool, request_of(small[-1], 1))
    for _ in range(4):
        engines.step()
    waits = sorted(engines.waited(one) for one in small)
    assert waits[int(0.99 * len(waits))] <= 3, waits[-10:]


@pytest.mark.parametrize("num_pools", [1, 2, 4])
def test_one_batch_uses_all_slots_but_those_kept(num_pools):
    engines = Engines(2, num_pools, lengths=(50, 250))
    engines.submit(engines.pools[0], request_of(1, 65_536))
    for _ in range(20):
        engines.step()
    engines.num_idle = 0
    for _ in range(200):
        engines.step()
    # The simulated engine leaves the slot of a job that ends empty until the next step.
    assert engines.num_idle / (2 * 200 * NUM_SLOTS) <= 0.021


# Jobs that are all as long end together; then the kept slots are enough for fewer small requests.
@pytest.mark.parametrize("shortest, every", [(1, 1), (16, 4)])
def test_short_jobs_are_sent_ahead_and_a_small_request_starts_within_3_steps(shortest, every):
    engines = Engines(1, num_pools=2, lengths=(shortest, 16))
    engines.submit(engines.pools[0], request_of(1_000_000, 65_536, num_tokens=16))
    small = range(0, 300, every)
    for number in range(300):
        engines.step()
        if number in small:
            engines.submit(engines.pools[number // every % 2], request_of(number, 1))
    assert engines.num_idle / (300 * NUM_SLOTS) <= 0.021
    engines.step()
    waits = sorted(engines.waited(number) for number in small if number < 295)
    assert waits[int(0.99 * len(waits))] <= 3, waits[-10:]


@pytest.mark.parametrize("n", [1, 8])
def test_two_batches_at_two_front_ends_share_the_slots_and_do_not_queue_in_the_engine(n):
    engines = Engines(1, num_pools=2, lengths=(20, 100))
    first, second = engines.pools
    engines.submit(first, request_of(1, 20_000, n=n))
    for _ in range(20):
        engines.step()
    engines.submit(second, request_of(100_000, 20_000, n=n))
    for _ in range(300):
        engines.step()
        # A job of the simulated engine takes one slot, whatever its width.
        assert sum(pool.workers["w0"].num_sequences for pool in engines.pools) <= NUM_SLOTS + n
    shares = [pool.workers["w0"].num_sequences for pool in engines.pools]
    assert min(shares) >= 0.45 * NUM_SLOTS, shares


def test_two_batches_at_once_do_not_queue_in_the_engine():
    engines = Engines(1, num_pools=2, lengths=(50, 250))
    for number, pool in enumerate(engines.pools):
        engines.submit(pool, request_of(number * 100_000, 20_000))
    for _ in range(20):
        engines.step()
        assert len(engines.queues["w0"]) == 0


@pytest.mark.parametrize("num_pools", [1, 2])
def test_many_small_requests_of_a_key_leave_others_their_shares(num_pools):
    engines = Engines(2, num_pools, lengths=(20, 100))
    ids = itertools.count(1)
    for number, pool in enumerate(engines.pools):
        engines.submit(pool, request_of(10**6 * (number + 1), 20_000, key="batch", weight=3))
        for _ in range(10_000):
            engines.submit(pool, request_of(next(ids), 1, key="small"))
    for _ in range(400):
        engines.step()
    num_small = sum(one < 10**6 for one in engines.started)
    assert 0.2 <= num_small / len(engines.started) <= 0.3


@pytest.mark.parametrize("num_slots, num_kept", [(1, 0), (2, 0), (7, 0), (8, 1), (256, 5)])
def test_few_slots_are_all_used(num_slots, num_kept):
    pool = Pool(no_worker_timeout_s=10)
    pool.add_worker("a", now=0)
    facts = msgspec.structs.replace(FACTS, max_num_seqs=num_slots)
    pool.on_heartbeat("a", msgspec.structs.replace(beat("a"), facts=facts), now=0)
    pool.submit(request_of(1, 1000))
    pool.assign()
    assert pool.workers["a"].num_sequences == num_slots - num_kept
    pool.submit(request_of(5000, 1))
    assert sum(len(one.jobs) for one in pool.assign()) == bool(num_kept)
