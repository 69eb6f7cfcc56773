"""Requests have turns, and new ones find a free slot: pools beside simulated engines, in steps."""

import itertools
import random
import time
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.pool.records import OpenJob, WaitingJobs
from app.pool.request import Request
from app.pool.state import Pool
from tests.kit.workers.pools import FACTS, beat
from tests.kit.workers.simulated_worker import SimulatedWorker
from titopool.slots import num_kept
from titopool.wire.messages import Job

NUM_SLOTS = 256


def request_of(
    first_id: int, num_jobs: int, num_tokens: int = 1000, n: int = 1, key: str = "", weight: int = 1
) -> Request:
    ids = range(first_id, first_id + num_jobs)
    jobs = [Job(one, 1, b"", n, num_tokens, b"", key_name=key) for one in ids]
    return Request(jobs, weight=weight)


def append(waiting: WaitingJobs, request: Request) -> None:
    for index, job in enumerate(request.jobs):
        waiting.append(OpenJob(job, request, index))


def take_whole(waiting: WaitingJobs, open_job: OpenJob) -> None:
    """Counts a turn with all completions of a job."""
    waiting.take(open_job, open_job.job.num_sequences, is_whole=True)


def take(waiting: WaitingJobs, number: int) -> list[int]:
    """Takes jobs; returns the ids of their requests' first jobs."""
    taken = []
    for _ in range(number):
        open_job = waiting.first
        take_whole(waiting, open_job)
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
            take_whole(waiting, rng.choice(list(waiting)[:3]))
        inside = {one.job.job_id: one.request for one in waiting}
        assert len(waiting) == len(inside)
        assert not waiting or next(iter(inside)) == waiting.first.job.job_id
    waiting.remove_all()
    assert (len(waiting), list(waiting), list(waiting.new_jobs())) == (0, [], [])


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
        take_whole(waiting, open_job)
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
    """Front ends' pools beside simulated workers."""

    def __init__(
        self,
        num_workers: int,
        num_pools: int,
        lengths: tuple[int, int],
        num_slots: int = NUM_SLOTS,
        *,
        bunches: bool = False,
    ):
        """`lengths`: of completions, in steps."""
        self.step_number = 0
        self.num_slots = num_slots
        self.pools = [Pool(no_worker_timeout_s=10) for _ in range(num_pools)]
        rng = random.Random(0)
        self.workers = {
            name: SimulatedWorker(name, num_slots, num_pools, rng, lengths, bunches=bunches)
            for name in (f"w{index}" for index in range(num_workers))
        }
        # By job id: the step of its submission.
        self.submitted: dict[int, int] = {}
        self.num_idle = 0
        facts = msgspec.structs.replace(FACTS, max_num_seqs=num_slots)
        for pool in self.pools:
            for name in self.workers:
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
            for index, pool in enumerate(self.pools):
                for sent in pool.assign():
                    self.workers[sent.worker.endpoint].receive(index, sent)
            self.report()
        for worker in self.workers.values():
            self.num_idle += worker.step()
        self.report()

    def report(self) -> None:
        for name, worker in self.workers.items():
            for index, pool in enumerate(self.pools):
                pool.on_results(name, worker.take_results(index))
                pool.on_load(name, worker.load_of_others(index))

    @property
    def started(self) -> dict[int, int]:
        """By job id: the step in which its first completion ran first."""
        workers = self.workers.values()
        return {job_id: step for one in workers for (_, job_id), step in one.started.items()}

    def waits(self, job_ids: Iterable[int]) -> list[int]:
        """Steps from the submission until the start, sorted; an idle engine has 1."""
        started = self.started
        return sorted(started[one] - self.submitted[one] for one in job_ids)


@pytest.mark.parametrize("bunches", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_small_request_starts_within_3_steps_beside_one_of_65536_prompts(num_workers, bunches):
    engines = Engines(num_workers, num_pools=2, lengths=(50, 250), bunches=bunches)
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
    waits = engines.waits(small)
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


def test_completions_that_begin_together_do_so_in_one_step_of_eight_and_slots_stay_busy():
    engines = Engines(1, num_pools=2, lengths=(50, 250), bunches=True)
    for number, pool in enumerate(engines.pools):
        engines.submit(pool, request_of(10**6 * number, 2000, 8000, n=8))
    for _ in range(250):
        engines.step()
    engines.num_idle, num_steps_with_begins = 0, 0
    worker = engines.workers["w0"]
    for _ in range(400):
        engines.step()
        num_steps_with_begins += any(one.first == worker.step_number for one in worker.running)
    assert num_steps_with_begins <= 400 / 8 + 5
    # The slots that are kept, and those of half a bunch.
    assert engines.num_idle / (400 * NUM_SLOTS) <= 0.021 + 0.035


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
    waits = engines.waits(number for number in small if number < 295)
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
        # As many as end in two steps, and at first the second one's first jobs.
        assert engines.workers["w0"].num_running <= NUM_SLOTS + 4 * NUM_SLOTS / 60
    shares = [pool.workers["w0"].num_sequences for pool in engines.pools]
    assert min(shares) >= 0.45 * NUM_SLOTS, shares


def test_two_batches_at_once_do_not_queue_in_the_engine():
    engines = Engines(1, num_pools=2, lengths=(50, 250))
    for number, pool in enumerate(engines.pools):
        engines.submit(pool, request_of(number * 100_000, 20_000))
    for _ in range(20):
        engines.step()
        assert len(engines.workers["w0"].waiting) == 0


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


@pytest.mark.parametrize(
    "num_slots, num_kept", [(1, 0), (2, 0), (8, 0), (15, 0), (16, 1), (256, 5)]
)
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


@pytest.mark.parametrize(
    "num_wide, num_slots, n",
    [
        (1, 64, 1000), (4, 64, 1000), (1, 256, 4096),
        pytest.param(4, 256, 4096, marks=pytest.mark.variant),
    ],
)  # fmt: skip
def test_small_requests_start_within_3_steps_beside_wide_ones_which_end(num_wide, num_slots, n):
    """16 clients send one after the other, of 8 tokens each."""
    engines = Engines(1, num_pools=2, lengths=(50, 250), num_slots=num_slots)
    wide = [request_of(10**6 * number, 1, 1000 * n, n=n) for number in range(1, num_wide + 1)]
    small: list[Request] = []
    clients: list[Request | None] = [None] * 16
    while not all(one.is_done for one in wide):
        for index, last in enumerate(clients):
            if last is None or last.is_done:
                small.append(request_of(len(small), 1, num_tokens=8))
                clients[index] = small[-1]
                engines.submit(engines.pools[index % 2], small[-1])
        for number, one in enumerate(wide):
            if engines.step_number == 30:
                engines.submit(engines.pools[number % 2], one)
        engines.step()
        # All slots for the time of their completions, and half of that for the small ones.
        assert engines.step_number < 250 + 150 * num_wide * n / num_slots * 1.5
    # All completions that begin together have not ended before.
    job_ids = [job.job_id for one in small for job in one.jobs if one.is_done]
    waits = engines.waits(one for one in job_ids if engines.submitted[one] > 280)
    assert waits[int(0.99 * len(waits))] <= 3, waits[-10:]


@pytest.mark.parametrize("num_wide", [1, 4])
def test_requests_of_nearly_all_slots_end_beside_small_ones(num_wide):
    engines = Engines(1, num_pools=2, lengths=(50, 250), num_slots=64)
    wide = [request_of(10**6 * number, 1, 60_000, n=60) for number in range(1, num_wide + 1)]
    clients: list[Request | None] = [None] * 16
    ids = itertools.count()
    while not all(one.is_done for one in wide):
        for index, last in enumerate(clients):
            if last is None or last.is_done:
                new = clients[index] = request_of(next(ids), 1, num_tokens=8)
                engines.submit(engines.pools[index % 2], new)
        for number, one in enumerate(wide):
            if engines.step_number == 30:
                engines.submit(engines.pools[number % 2], one)
        engines.step()
        assert engines.step_number < 30 + 250 * (num_wide + 1)


def test_groups_take_whole_turns_beside_a_long_queue_of_single_requests():
    """Groups of 8 came after the first 100 of 600 single ones, on 64 slots that become free singly."""
    engines = Engines(1, num_pools=1, lengths=(50, 250), num_slots=64)
    (pool,) = engines.pools
    single = [request_of(number, 1) for number in range(600)]
    groups = [request_of(1000 + number, 1, 8000, n=8) for number in range(16)]
    for one in (*single[:100], *groups, *single[100:]):
        engines.submit(pool, one)
    ended: dict[int, int] = {}
    while len(ended) < len(groups):
        engines.step()
        for number, one in enumerate(groups):
            if one.is_done:
                ended.setdefault(number, engines.step_number)
    print("groups ended after", sorted(ended.values()))
    # 228 completions come before their ends: 150 steps each on average, and the longest of 8.
    assert max(ended.values()) < 1.2 * (150 * 228 / 64 + 250)


def test_a_wide_request_that_has_begun_keeps_no_other_one_from_another_worker():
    """Both workers are full but for a kept slot each; the first half of a group takes one."""
    pool = Pool(no_worker_timeout_s=10)
    facts = msgspec.structs.replace(FACTS, max_num_seqs=64)
    for name in ("a", "b"):
        pool.add_worker(name, now=0)
        pool.on_heartbeat(name, msgspec.structs.replace(beat(name), facts=facts), now=0)
    pool.submit(request_of(0, 1000))
    assert sum(len(one.jobs) for one in pool.assign()) == 2 * (64 - num_kept(64))
    pool.submit(request_of(2000, 1, 8000, n=16))
    pool.submit(request_of(3000, 1))
    sent = {job.job_id: one.worker.endpoint for one in pool.assign() for job in one.jobs}
    assert sent.keys() == {2000, 3000}
    assert sent[2000] != sent[3000]
