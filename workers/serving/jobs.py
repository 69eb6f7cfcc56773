"""A worker's records: the jobs of each front end, and counters and prefixes of finished jobs."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from titopool.settings.sampling import has_grammar
from titopool.slots import SlotTable
from titopool.wire.messages import (
    Completed,
    Failed,
    FrontEndTotals,
    Heartbeat,
    Job,
    JobId,
    JobProgress,
    KeyTotals,
    Result,
    WorkerCounters,
    WorkerFacts,
)
from titopool.wire.prefixes import completion_hashes, prompt_hashes
from workers.engine.base import Generated
from workers.serving.slots import JobSlots

# Job id and attempt.
JobKey = tuple[JobId, int]
# Token ids travel as int32.
ID_BYTES = 4


@dataclass
class FrontEnd:
    """A front end that has sent `Hello`, and its jobs in flight."""

    last_hello: float
    # As it said last.
    totals: FrontEndTotals = field(default_factory=FrontEndTotals)
    # As in `Hello`.
    wants_metrics: bool = False
    # The last one to it.
    heartbeat: Heartbeat | None = None
    jobs: dict[JobKey, Job] = field(default_factory=dict)
    tasks: dict[JobKey, asyncio.Task[None]] = field(default_factory=dict)
    # How far the completions of the jobs in flight are.
    slots: SlotTable[JobKey] = field(default_factory=SlotTable)
    job_slots: dict[JobKey, JobSlots] = field(default_factory=dict)
    # Upper estimate of the tokens of the jobs in flight.
    num_tokens: int = 0
    # Jobs whose progress has changed since the last message.
    changed: set[JobKey] = field(default_factory=set)
    outbox: list[Result] = field(default_factory=list)
    # Jobs that the engine has got, and those of them that have no token.
    begun: set[JobKey] = field(default_factory=set)
    new: set[JobKey] = field(default_factory=set)
    # Jobs that have started and have a grammar.
    grammars: set[JobKey] = field(default_factory=set)
    # For the next report of load: prefix digests of other front ends' jobs.
    prefixes: bytearray = field(default_factory=bytearray)

    def add(self, key: JobKey, job: Job, task: asyncio.Task[None], slots: JobSlots) -> None:
        """Adds a job in flight."""
        self.jobs[key], self.tasks[key], self.job_slots[key] = job, task, slots
        self.num_tokens += job.num_tokens

    def note_end(self, key: JobKey) -> None:
        """One more completion of a job has ended."""
        job, num_left = self.jobs[key], self.slots[key].num_left
        self.num_tokens -= job.num_tokens_of(num_left + 1) - job.num_tokens_of(num_left)

    def take_results(self) -> list[Result]:
        """What is to be sent now: results, and the progress of other jobs."""
        for key in self.changed:
            at = self.slots[key]
            # One with a slot may be held beside jobs that run apart. One whose last completion has
            # ended is about to send its result.
            if key in self.begun and (at.num_left or not at.num):
                self.outbox.append(
                    JobProgress(*key, has_token=False, num_started=at.started, num_ended=at.ended)
                )
        self.changed.clear()
        results, self.outbox = self.outbox, []
        return results

    def remove(self, key: JobKey) -> None:
        """Removes a job that has ended."""
        self.num_tokens -= self.jobs[key].num_tokens_of(self.slots[key].num_left)
        del self.jobs[key], self.tasks[key], self.job_slots[key]
        self.begun.discard(key)
        self.new.discard(key)
        self.grammars.discard(key)
        self.changed.discard(key)

    def start(self, key: JobKey, job: Job) -> None:
        """Counts a job that the engine gets now."""
        self.begun.add(key)
        self.new.add(key)
        if has_grammar(job):
            self.grammars.add(key)

    @property
    def risks(self) -> set[JobKey]:
        """Jobs that may end the engine: a grammar is read at every token."""
        return self.new | self.grammars


def count_job(
    counters: WorkerCounters, keys: dict[str, KeyTotals], job: Job, result: Completed | Failed
) -> None:
    """Counts a job that has ended, also for its key; one without completions has used no token."""
    if isinstance(result, Failed):
        counters.num_failed_jobs += 1
        return
    if not job.num_sequences:
        return
    counters.num_cached_tokens += result.num_cached_tokens
    num_prompt = len(result.prompt_token_ids or job.prompt_token_ids) // ID_BYTES
    num_completion = sum(len(one.token_ids) // ID_BYTES for one in result.completions)
    totals: list[WorkerCounters | KeyTotals] = [counters]
    if job.key_name:
        totals.append(keys.setdefault(job.key_name, KeyTotals()))
    for each in totals:
        each.num_completed_jobs += 1
        each.num_prompt_tokens += num_prompt
        each.num_completion_tokens += num_completion


def prefix_of(job: Job, generated: Generated, facts: WorkerFacts | None) -> bytes:
    """`Completed.prefix`: prefix digests that follow-up prompts can hit in the cache."""
    if job.prefix is None or facts is None:
        return b""
    if any(one.kv_from for one in generated.completions):
        # No later request reads keys that were kept for this one.
        return b""
    chain = b""
    if generated.prompt_token_ids:
        # The next turn begins with the expanded ids, not with the ids that the client sent.
        digests = [image.digest for image in job.images]
        chain = prompt_hashes(generated.prompt_token_ids, job.cache_salt, digests, facts.images)
        job = msgspec.structs.replace(
            job, prompt_token_ids=generated.prompt_token_ids, prefix=chain
        )
    completions = [
        completion_hashes(job, one.token_ids, facts.images) for one in generated.completions
    ]
    return chain + b"".join(completions)


def sum_of(totals: Iterable[FrontEndTotals]) -> FrontEndTotals:
    """The totals of all front ends."""
    memory_taken = memory_limit = num_waiting = 0
    refused = Counter[str]()
    for one in totals:
        memory_taken += one.memory_taken
        memory_limit += one.memory_limit
        num_waiting += one.num_waiting
        refused.update(one.refused)
    return FrontEndTotals(memory_taken, memory_limit, num_waiting, dict(refused))
