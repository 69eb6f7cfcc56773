"""Random histories of front ends' pools and workers: no slot is counted twice or lost, none starves.

    SLOT_HISTORIES=100000 python -m pytest -n 0 --timeout=0 tests/unit/app/test_slot_histories.py

plays so many (ten minutes of a core); `SLOT_SEED` begins with another one.
"""

import logging
import os
import random
from collections import Counter, deque
from typing import Any

import msgspec
import pytest

from app.pool.placement import ROUTING_POLICIES
from app.pool.records import Worker
from app.pool.request import Request
from app.pool.state import Assignment, Pool
from tests.kit.workers.pools import FACTS, beat
from tests.kit.workers.simulated_worker import SimulatedWorker
from titopool.errors import GenerationFailed
from titopool.settings.sampling import SamplingOptions, StructuredOutputs, encode_options
from titopool.slots import MAX_NEW, SlotTable
from titopool.wire.messages import Completed, Job, Result

NUM_HISTORIES = int(os.environ.get("SLOT_HISTORIES", "400"))
FIRST_SEED = int(os.environ.get("SLOT_SEED", "0"))
NUM_PARTS = 4
# Of a history with arrivals and losses, and the most until all has ended after it.
NUM_STEPS, MAX_STEPS = 30, 4000
PLAIN = msgspec.Raw(encode_options(SamplingOptions()))
GRAMMAR = msgspec.Raw(
    encode_options(SamplingOptions(structured_outputs=StructuredOutputs(regex="a+")))
)
Message = tuple[str, Any]


class CountedRequest(Request):
    """A request each of whose jobs may end once."""

    def __init__(self, jobs: list[Job], weight: int):
        super().__init__(jobs, weight=weight)
        self.ended = Counter[int]()

    def complete(self, index: int, result: Completed) -> None:
        self.ended[index] += 1
        assert self.ended[index] == 1, f"job {self.jobs[index].job_id} ends twice"
        super().complete(index, result)


class Process:
    """A worker process, and the messages on their way between it and each front end."""

    def __init__(self, history: "History", name: str, number: int):
        self.incarnation, self.phase, self.is_dead = f"{name}-{number}", "ready", False
        self.worker = SimulatedWorker(
            name, history.num_slots, len(history.pools), history.rng, history.lengths,
            bunches=history.bunches,
        )  # fmt: skip
        self.to_worker: list[deque[Message]] = [deque() for _ in history.pools]
        self.to_pool: list[deque[Result]] = [deque() for _ in history.pools]


class History:
    """What happens to pools and workers, by a seed."""

    def __init__(self, seed: int):
        rng = self.rng = random.Random(seed)
        self.num_slots, self.bunches = rng.randint(1, 16), rng.random() < 0.5
        shortest = rng.choice((1, 1, 3))
        self.lengths = shortest, shortest + rng.choice((0, 2, 9))
        self.step_number = 0
        policy = rng.choice(list(ROUTING_POLICIES.values()))
        self.pools = [
            Pool(no_worker_timeout_s=10, policy=policy()) for _ in range(rng.randint(1, 2))
        ]
        self.facts = msgspec.structs.replace(FACTS, max_num_seqs=self.num_slots)
        self.numbers = Counter[str]()
        self.processes: dict[str, Process] = {}
        for name in "abc"[: rng.randint(1, 3)]:
            self.start(name)
            for pool in self.pools:
                pool.add_worker(name, now=0)
                self.beat(pool, name)
        self.requests: list[tuple[Pool, CountedRequest]] = []
        self.num_jobs = 0
        # Of the last messages, some come again.
        self.last_results: list[tuple[Pool, str, Result]] = []
        self.last_grants: list[tuple[str, int, Message]] = []

    # ---- workers -------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.numbers[name] += 1
        old, new = self.processes.get(name), Process(self, name, self.numbers[name])
        if old is not None:
            # Front ends that have not learned of the loss still send to the address.
            new.to_worker = old.to_worker
        self.processes[name] = new

    def beat(self, pool: Pool, name: str) -> None:
        process = self.processes[name]
        if process.is_dead:
            return
        worker, facts = pool.workers[name], self.facts
        if worker.heartbeat is not None and worker.heartbeat.incarnation != process.incarnation:
            process.to_worker[self.pools.index(pool)].clear()
        load = process.worker.load_of_others(self.pools.index(pool))
        heartbeat = msgspec.structs.replace(
            beat(name, incarnation=process.incarnation), facts=facts, phase=process.phase,
            num_front_ends=len(self.pools), other_sequences=load.other_sequences,
            num_wanted_ahead=load.num_wanted_ahead,
        )  # fmt: skip
        pool.on_heartbeat(name, heartbeat, now=self.step_number)

    def lose(self, pool: Pool, name: str, *, blames_jobs: bool) -> None:
        if pool.workers[name].heartbeat is not None:
            self.processes[name].to_worker[self.pools.index(pool)].clear()
            pool.mark_worker_lost(name, "staged", blames_jobs=blames_jobs)

    def die(self, name: str, *, blames_jobs: bool) -> None:
        """Ends a process; some front ends learn it from the heartbeat of the next one."""
        process = self.processes[name]
        process.is_dead = True
        for index, pool in enumerate(self.pools):
            self.last_results += [(pool, name, one) for one in process.to_pool[index]]
            if self.rng.random() < 0.7:
                self.lose(pool, name, blames_jobs=blames_jobs)

    # ---- messages ------------------------------------------------------------------------

    def assign(self, index: int) -> None:
        for sent in self.pools[index].assign():
            check_assignment(sent)
            process = self.processes[sent.worker.endpoint]
            assert sent.worker.heartbeat is not None
            message = (sent.worker.heartbeat.incarnation, sent)
            process.to_worker[index].append(("generate", message))
            for more in sent.more.values():
                process.to_worker[index].append(("grant", more))

    def abort(self, pool: Pool, aborts: list[tuple[Worker, list[tuple[int, int]]]]) -> None:
        for worker, keys in aborts:
            for key in keys:
                process = self.processes[worker.endpoint]
                process.to_worker[self.pools.index(pool)].append(("abort", key))

    def send(self, name: str, index: int, message: Message) -> None:
        worker, (kind, content) = self.processes[name].worker, message
        if kind == "abort":
            worker.abort(index, *content)
        elif kind == "grant":
            self.last_grants.append((name, index, message))
            worker.grant(index, content)
        elif content[0] == self.processes[name].incarnation:
            sent: Assignment = content[1]
            for job, num in zip(sent.jobs, sent.granted, strict=True):
                worker.generate(index, job, num, is_new=sent.is_new, is_apart=bool(sent.apart))

    def deliver(self, *, is_late: bool) -> None:
        """Passes messages on, in their order; `is_late`: perhaps not all."""
        for name, process in self.processes.items():
            for index, pool in enumerate(self.pools):
                if process.is_dead:
                    continue
                queue = process.to_worker[index]
                for _ in range(self.rng.randint(0, len(queue)) if is_late else len(queue)):
                    self.send(name, index, queue.popleft())
                answers = process.to_pool[index]
                answers.extend(process.worker.take_results(index))
                heartbeat = pool.workers[name].heartbeat
                if heartbeat is None or heartbeat.incarnation != process.incarnation:
                    # Not connected to this process.
                    continue
                num = self.rng.randint(0, len(answers)) if is_late else len(answers)
                results = [answers.popleft() for _ in range(num)]
                pool.on_results(name, results)
                self.last_results += [(pool, name, one) for one in results]
        self.withdraw_failed()

    def withdraw_failed(self) -> None:
        for pool in self.pools:
            for request in pool.take_failed():
                self.abort(pool, pool.withdraw(request))

    # ---- what happens --------------------------------------------------------------------

    def arrive(self) -> None:
        rng, pool = self.rng, self.rng.choice(self.pools)
        key, num_steps = rng.choice(("", "", "a", "b")), rng.choice((4, 100))
        sampling = GRAMMAR if rng.random() < 0.1 else PLAIN
        n = rng.choice((1, 1, 2, rng.randint(0, 3 * self.num_slots)))
        first = self.num_jobs + 1
        self.num_jobs += rng.choice((1, 1, rng.randint(1, 5)))
        jobs = [
            Job(job_id, 1, b"", n, n * num_steps, sampling, key_name=key)
            for job_id in range(first, self.num_jobs + 1)
        ]
        request = CountedRequest(jobs, weight=2 if key == "b" else 1)
        self.requests.append((pool, request))
        pool.submit(request)

    def trouble(self) -> None:
        """One thing that may happen at any time."""
        rng = self.rng
        name, pool = rng.choice(list(self.processes)), rng.choice(self.pools)
        process = self.processes[name]
        match rng.randrange(8):
            case 0:
                self.die(name, blames_jobs=rng.random() < 0.6)
            case 1 if process.is_dead:
                self.start(name)
            case 2 if not process.is_dead:
                process.phase = "draining"
            case 3 if process.worker.jobs:
                process.worker.fail(rng.choice(list(process.worker.jobs.values())))
            case 4 if self.requests:
                owner, request = rng.choice(self.requests)
                if request.fail(GenerationFailed("the client has gone")):
                    self.abort(owner, owner.withdraw(request))
            case 5:
                _, aborts = pool.end_waiting(None)
                self.abort(pool, aborts)
            case 6 if self.last_grants:
                self.send(*rng.choice(self.last_grants))
            case 7:
                self.lose(pool, name, blames_jobs=rng.random() < 0.5)
                # It serves on; the front end connects again, and its jobs there are lost.
                self.forget(name, self.pools.index(pool))

    def forget(self, name: str, index: int) -> None:
        """The worker drops a front end that was silent."""
        worker = self.processes[name].worker
        for key in [key for key in worker.jobs if key[0] == index]:
            worker.abort(*key)
        self.processes[name].to_pool[index].clear()
        worker.front_ends[index].outbox.clear()

    def repeat(self) -> None:
        """Some results come again, or after the loss of their worker when the job is elsewhere."""
        num_last = min(20, len(self.last_results))
        for owner, name, result in self.rng.choices(self.last_results[-20:], k=num_last // 2):
            owner.on_results(name, [result])
        self.withdraw_failed()

    def step(self, *, is_late: bool) -> None:
        self.step_number += 1
        if is_late:
            self.repeat()
        for index in range(len(self.pools)):
            self.assign(index)
            self.deliver(is_late=is_late)
        for name, process in self.processes.items():
            if process.is_dead:
                continue
            process.worker.step()
            is_empty = not process.worker.jobs and not any(process.to_worker)
            if process.phase == "draining" and is_empty and not any(process.to_pool):
                self.die(name, blames_jobs=False)
        self.deliver(is_late=is_late)
        for pool in self.pools:
            for name, process in self.processes.items():
                heartbeat = pool.workers[name].heartbeat
                if not process.is_dead and (not is_late or self.rng.random() < 0.5):
                    if heartbeat is None or self.rng.random() < 0.3 or not is_late:
                        self.beat(pool, name)
                    else:
                        load = process.worker.load_of_others(self.pools.index(pool))
                        pool.on_load(name, load)
        self.withdraw_failed()
        self.check()
        if not is_late:
            self.deliver(is_late=False)
            self.check_agreement()

    def play(self) -> None:
        for _ in range(NUM_STEPS):
            if self.rng.random() < 0.3:
                self.arrive()
            if self.rng.random() < 0.3:
                self.trouble()
                self.withdraw_failed()
            self.step(is_late=True)
        for _ in range(MAX_STEPS):
            for name, process in self.processes.items():
                if process.is_dead:
                    self.start(name)
            self.step(is_late=False)
            if self.is_over:
                break
        self.check_end()

    # ---- what must hold ------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return (
            all(request.is_done for _, request in self.requests)
            and not any(one.worker.jobs or one.phase != "ready" for one in self.processes.values())
            and not any(worker.jobs for pool in self.pools for worker in pool.workers.values())
        )

    def check(self) -> None:
        for pool in self.pools:
            for worker in pool.workers.values():
                check_worker(worker)
            self.check_jobs(pool)
        for process in self.processes.values():
            check_process(process.worker, self.lengths[0])

    def check_jobs(self, pool: Pool) -> None:
        """Each open job is at one place, and it waits on while some of it is not granted."""
        at_workers = [one for worker in pool.workers.values() for one in worker.jobs.values()]
        waiting = [one.job.job_id for one in pool.waiting if not one.endpoint]
        waiting += [one.job.job_id for queue in (pool.renders, pool.suspects) for one in queue]
        places = Counter([*(one.job.job_id for one in at_workers), *waiting])
        expected = {
            request.jobs[index].job_id
            for owner, request in self.requests
            if owner is pool and not request.is_done
            for index in range(len(request.jobs))
            if not request.ended[index]
        }
        assert places == dict.fromkeys(expected, 1)
        begun = {one.job.job_id for one in pool.waiting if one.endpoint}
        partial = {
            one.job.job_id
            for worker in pool.workers.values()
            for one in worker.jobs.values()
            if worker.slots[one.job.job_id].num_waiting
        }
        assert begun == partial == {one.job.job_id for one in pool.waiting.begun}
        assert pool.num_open_jobs == len(expected)

    def check_agreement(self) -> None:
        """All messages have come: workers run nothing that no front end waits for."""
        for name, process in self.processes.items():
            for index, pool in enumerate(self.pools):
                open_jobs = [one.job for one in pool.workers[name].jobs.values()]
                wanted = {(index, job.job_id, job.attempt) for job in open_jobs}
                assert {key for key in process.worker.jobs if key[0] == index} <= wanted

    def check_end(self) -> None:
        for _, request in self.requests:
            assert request.is_done, "a request waits for ever"
            assert request.error is not None or len(request.ended) == len(request.jobs)
        for pool in self.pools:
            assert (pool.num_open_jobs, len(pool.waiting), list(pool.waiting)) == (0, 0, [])
            for worker in pool.workers.values():
                totals = worker.num_sequences, worker.num_tokens, worker.num_renders
                assert totals == (0, 0, 0)
        for process in self.processes.values():
            slots = process.worker.slots
            assert (process.worker.num_running, slots._new.num_running) == (0, 0)
            assert not slots._held
            assert process.phase == "ready", "a worker drains for ever"


def check_assignment(sent: Assignment) -> None:
    assert len(sent.jobs) == len(sent.granted)
    assert all(
        0 < num <= job.num_sequences or num == job.num_sequences == 0
        for job, num in zip(sent.jobs, sent.granted, strict=True)
    )


def check_table(table: SlotTable[Any]) -> None:
    """The sums are those of the jobs, and each number is at most the one before it."""
    num_held = num_running = 0
    for key in table:
        at = table[key]
        assert 0 <= at.ended <= at.started <= at.granted <= at.num
        num_held += at.granted - at.started
        num_running += at.started - at.ended
    assert (table.num_held, table.num_running) == (num_held, num_running)


def check_worker(worker: Worker) -> None:
    check_table(worker.slots)
    assert set(worker.slots) == worker.jobs.keys()
    assert worker.started | worker.with_token | worker.new <= worker.jobs.keys()
    jobs = [one.job for one in worker.jobs.values()]
    assert worker.num_renders == sum(not job.num_sequences for job in jobs)
    left = [job.num_tokens_of(worker.slots[job.job_id].num_left) for job in jobs]
    assert worker.num_tokens == sum(left)
    assert all(one.endpoint == worker.endpoint for one in worker.jobs.values())


def check_process(worker: SimulatedWorker, shortest: int) -> None:
    held: list[Any] = []
    for one in worker.front_ends:
        check_table(one.slots)
        held += [key for key in one.slots if one.slots[key].num_held]
    in_engine = len(worker.waiting) + len(worker.running)
    assert worker.num_running == in_engine
    # What waits there and nothing else: the others would starve, and these would be a leak.
    assert sorted(one.key for one in worker.slots._held) == sorted(held)
    assert {one.key for one in worker.slots._new} <= worker.jobs.keys()
    check_table(worker.slots._new)
    # The engine has no more than its slots, what ends within two steps, and what passes the others.
    num_more = -(-2 * worker.num_slots // shortest)
    num_passed = worker.num_slots // 2 + MAX_NEW + worker.num_apart
    assert in_engine <= worker.num_slots + num_more + num_passed


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_slot_is_counted_twice_or_lost_and_every_job_ends_once(
    part: int, caplog: pytest.LogCaptureFixture
):
    # Each loss of a worker is a warning.
    caplog.set_level(logging.CRITICAL)
    for seed in range(FIRST_SEED + part, FIRST_SEED + NUM_HISTORIES, NUM_PARTS):
        try:
            History(seed).play()
        except Exception as error:
            raise AssertionError(f"history {seed}") from error
