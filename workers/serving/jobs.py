"""A worker's records: the jobs of each front end, and counters and prefixes of finished jobs."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from titopool.settings.sampling import has_grammar
from titopool.wire.messages import (
    Completed,
    Failed,
    FrontEndTotals,
    Job,
    JobId,
    KeyTotals,
    Result,
    WorkerCounters,
    WorkerFacts,
)
from titopool.wire.prefixes import completion_hashes, prompt_hashes
from workers.engine.base import Generated

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
    jobs: dict[JobKey, Job] = field(default_factory=dict)
    tasks: dict[JobKey, asyncio.Task[None]] = field(default_factory=dict)
    # Totals of the jobs in flight: completions, and at most so many tokens.
    num_sequences: int = 0
    num_tokens: int = 0
    outbox: list[Result] = field(default_factory=list)
    # Jobs that run apart or were sent ahead and have not started; they are no load.
    held: set[JobKey] = field(default_factory=set)
    # Completions in flight without those of `held`.
    num_started: int = 0
    # Jobs that have started and have no token.
    new: set[JobKey] = field(default_factory=set)
    # Jobs that have started and have a grammar.
    grammars: set[JobKey] = field(default_factory=set)
    # For the next report of load: prefix digests of other front ends' jobs.
    prefixes: bytearray = field(default_factory=bytearray)

    def add(self, key: JobKey, job: Job, task: asyncio.Task[None], *, is_held: bool) -> None:
        """Adds a job in flight; `is_held`: it does not start yet."""
        self.jobs[key], self.tasks[key] = job, task
        self.num_sequences += job.num_sequences
        self.num_tokens += job.num_tokens
        if is_held:
            self.held.add(key)
        else:
            self.num_started += job.num_sequences

    def remove(self, key: JobKey) -> None:
        """Removes a job that has ended."""
        self.release(key)
        del self.tasks[key]
        job = self.jobs.pop(key)
        self.num_sequences -= job.num_sequences
        self.num_started -= job.num_sequences
        self.num_tokens -= job.num_tokens
        self.new.discard(key)
        self.grammars.discard(key)

    def release(self, key: JobKey) -> None:
        """Counts a job in flight as one that takes a slot."""
        if key in self.held:
            self.held.remove(key)
            self.num_started += self.jobs[key].num_sequences

    def start(self, key: JobKey, job: Job) -> None:
        """Counts a job that the engine gets now."""
        self.release(key)
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


def num_steps_of(result: Completed) -> int:
    """How many engine steps a job took after its prompt, at most."""
    return max((len(one.token_ids) // ID_BYTES for one in result.completions), default=0)


def prefix_of(job: Job, generated: Generated, facts: WorkerFacts | None) -> bytes:
    """`Completed.prefix`: prefix digests that follow-up prompts can hit in the cache."""
    if job.prefix is None or facts is None:
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
    return FrontEndTotals(*map(sum, zip(*map(msgspec.structs.astuple, totals), strict=True)))
