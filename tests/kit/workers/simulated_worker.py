"""A worker in steps: its slots, and an engine that starts what it has first come, first served."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.pool.state import Assignment
from titopool.slots import SlotTable
from titopool.wire.messages import Completed, Completion, Failed, Job, JobProgress, Load, Result
from workers.serving.slots import EngineSlots, JobSlots

STEP_S = 0.02
COMPLETION = Completion(b"", "stop", None, [])
# Front end, job id and attempt.
SimulatedKey = tuple[int, int, int]


class StartingSlots(JobSlots):
    """`JobSlots` that tell the engine at once which completions start."""

    on_start: Callable[[int], None]

    def start(self, num: int) -> None:
        before = self.progress.started
        super().start(num)
        self.on_start(self.progress.started - before)


@dataclass(eq=False)
class SimulatedJob:
    key: SimulatedKey
    job: Job
    slots: StartingSlots
    has_token: bool = False


@dataclass(eq=False)
class Sequence:
    """A completion that the engine runs, and the first and the last step of it."""

    job: SimulatedJob
    first: int
    last: int


@dataclass
class FrontEnd:
    """What the worker keeps of a front end."""

    slots: SlotTable[SimulatedKey] = field(default_factory=SlotTable)
    outbox: list[Result] = field(default_factory=list)
    changed: set[SimulatedKey] = field(default_factory=set)


class SimulatedWorker:
    """As `WorkerServer` and its engine, without sockets and tasks."""

    def __init__(
        self,
        name: str,
        num_slots: int,
        num_front_ends: int,
        rng: random.Random,
        lengths: tuple[int, int],
        *,
        bunches: bool = False,
    ):
        """`lengths`: of completions, in steps, as far as their jobs allow so many tokens."""
        self.name, self.num_slots, self.rng, self.lengths = name, num_slots, rng, lengths
        self.step_number = 0
        self.front_ends = [FrontEnd() for _ in range(num_front_ends)]
        self.jobs: dict[SimulatedKey, SimulatedJob] = {}
        # In the engine: completions that wait for their first step, and those that run.
        self.waiting: deque[SimulatedJob] = deque()
        self.running: list[Sequence] = []
        # By front end and job id: the step in which the first completion ran first.
        self.started: dict[tuple[int, int], int] = {}
        # Jobs that began without a slot, as suspects do.
        self.num_apart = 0
        # Calls that are planned, each with its time.
        self.planned: list[tuple[float, Callable[[], None]]] = []
        self.slots = EngineSlots(
            lambda: self.num_running, lambda: self.now,
            lambda seconds, call: self.planned.append((self.now + seconds, call)),
        )  # fmt: skip
        self.slots.num_slots, self.slots.bunches = num_slots, bunches

    @property
    def now(self) -> float:
        return self.step_number * STEP_S

    @property
    def num_running(self) -> int:
        """Completions that the engine has."""
        return sum(one.slots.num_running for one in self.front_ends)

    # ---- messages ----------------------------------------------------------------------

    def receive(self, front_end: int, sent: Assignment) -> None:
        for job, num in zip(sent.jobs, sent.granted, strict=True):
            self.generate(front_end, job, num, is_new=sent.is_new, is_apart=bool(sent.apart))
        for more in sent.more.values():
            self.grant(front_end, more)

    def generate(
        self, front_end: int, job: Job, num: int, *, is_new: bool, is_apart: bool = False
    ) -> None:
        key, owner = (front_end, job.job_id, job.attempt), self.front_ends[front_end]
        if key in self.jobs:
            # A repeated message.
            return
        slots = StartingSlots(
            self.slots, owner.slots, key, job.num_sequences,
            lambda num_ended: owner.changed.add(key), is_new=is_new,
        )  # fmt: skip
        entry = self.jobs[key] = SimulatedJob(key, job, slots)
        slots.on_start = lambda num: self.waiting.extend([entry] * num)
        if is_apart:
            self.num_apart += 1
            slots.grant_apart()
        else:
            slots.grant(num)
        if not job.num_sequences:
            self._end(entry, Completed(job.job_id, job.attempt, [], 0))

    def grant(self, front_end: int, more: tuple[int, int, int]) -> None:
        job_id, attempt, num = more
        entry = self.jobs.get((front_end, job_id, attempt))
        if entry is not None:
            entry.slots.grant(num)

    def abort(self, front_end: int, job_id: int, attempt: int) -> None:
        entry = self.jobs.get((front_end, job_id, attempt))
        if entry is not None:
            self._remove(entry)

    def fail(self, entry: SimulatedJob) -> None:
        """The engine refuses a job, whatever it has started of it."""
        _, job_id, attempt = entry.key
        self._end(entry, Failed(job_id, attempt, "generation_failed", "staged"))

    def take_results(self, front_end: int) -> list[Result]:
        """As `workers.serving.jobs.FrontEnd.take_results`."""
        one = self.front_ends[front_end]
        for key in one.changed:
            at = one.slots[key]
            if at.num_left:
                one.outbox.append(
                    JobProgress(
                        *key[1:], has_token=False, num_started=at.started, num_ended=at.ended
                    )
                )
        results, one.outbox = one.outbox, []
        one.changed.clear()
        return results

    def load_of_others(self, front_end: int) -> Load:
        others = [one for index, one in enumerate(self.front_ends) if index != front_end]
        num_running = sum(one.slots.num_running for one in others)
        return Load(num_running, 0, num_wanted_ahead=self.slots.num_wanted_ahead)

    # ---- the engine ----------------------------------------------------------------------

    def step(self) -> int:
        """Runs a step; returns how many slots were idle."""
        self.step_number += 1
        due = [call for at, call in self.planned if at <= self.now]
        self.planned = [one for one in self.planned if one[0] > self.now]
        for call in due:
            call()
        while self.waiting and len(self.running) < self.num_slots:
            entry = self.waiting.popleft()
            longest = entry.job.num_tokens // entry.job.num_sequences
            length = min(self.rng.randint(*self.lengths), longest)
            self.running.append(Sequence(entry, self.step_number, self.step_number + length - 1))
            self.started.setdefault(entry.key[:2], self.step_number)
        num_idle = self.num_slots - len(self.running)
        ended = [one for one in self.running if one.last <= self.step_number]
        self.running = [one for one in self.running if one.last > self.step_number]
        for entry in {one.job: None for one in (*ended, *self.running)}:
            self._note_token(entry)
        for one in ended:
            num_steps = self.step_number - one.first + 1
            one.job.slots.give_back(num_steps, num_steps * STEP_S)
            if not one.job.slots.progress.num_left:
                _, job_id, attempt = one.job.key
                completions = [COMPLETION] * one.job.job.num_sequences
                self._end(one.job, Completed(job_id, attempt, completions, 0))
        return num_idle

    def _note_token(self, entry: SimulatedJob) -> None:
        if not entry.has_token:
            entry.has_token = True
            front_end, job_id, attempt = entry.key
            progress = JobProgress(job_id, attempt, has_token=True)
            self.front_ends[front_end].outbox.append(progress)

    def _end(self, entry: SimulatedJob, result: Any) -> None:
        self.front_ends[entry.key[0]].outbox.append(result)
        self._remove(entry)

    def _remove(self, entry: SimulatedJob) -> None:
        del self.jobs[entry.key]
        self.front_ends[entry.key[0]].changed.discard(entry.key)
        self.waiting = deque(one for one in self.waiting if one is not entry)
        self.running = [one for one in self.running if one.job is not entry]
        entry.slots.leave()
