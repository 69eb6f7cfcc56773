"""What a worker keeps of each front end's jobs, and what it records of those that have ended."""

import asyncio
from dataclasses import dataclass, field

import msgspec

from titopool.wire.messages import (
    Chunk,
    Completed,
    Failed,
    Job,
    JobId,
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
    """A gunicorn process that said Hello."""

    last_hello: float
    jobs: dict[JobKey, Job] = field(default_factory=dict)
    tasks: dict[JobKey, asyncio.Task[None]] = field(default_factory=dict)
    # Of all its jobs: completions, and tokens at most.
    num_sequences: int = 0
    num_tokens: int = 0
    outbox: list[Completed | Failed | Chunk] = field(default_factory=list)
    # Digests of what others' jobs left in the cache, for the next heartbeat.
    prefixes: bytearray = field(default_factory=bytearray)

    def add(self, key: JobKey, job: Job, task: asyncio.Task[None]) -> None:
        self.jobs[key], self.tasks[key] = job, task
        self.num_sequences += job.num_sequences
        self.num_tokens += job.num_tokens

    def forget(self, key: JobKey) -> None:
        del self.tasks[key]
        job = self.jobs.pop(key)
        self.num_sequences -= job.num_sequences
        self.num_tokens -= job.num_tokens


def count(counters: WorkerCounters, job: Job, result: Completed | Failed) -> None:
    """Adds a job that has ended."""
    if isinstance(result, Failed):
        counters.num_failed_jobs += 1
        return
    counters.num_completed_jobs += 1
    prompt_ids = result.prompt_token_ids or job.prompt_token_ids
    counters.num_prompt_tokens += len(prompt_ids) // ID_BYTES
    counters.num_cached_tokens += result.num_cached_tokens
    counters.num_completion_tokens += sum(
        len(completion.token_ids) // ID_BYTES for completion in result.completions
    )


def prefix_of(job: Job, generated: Generated, facts: WorkerFacts | None) -> bytes:
    """`Completed.prefix`: digests of what the prompts to come may begin with."""
    if job.prefix is None or facts is None:
        return b""
    chain = b""
    if generated.prompt_token_ids:
        # The next turn begins with these ids, not with those that were sent.
        digests = [image.digest for image in job.images]
        chain = prompt_hashes(generated.prompt_token_ids, job.cache_salt, digests, facts.images)
        job = msgspec.structs.replace(
            job, prompt_token_ids=generated.prompt_token_ids, prefix=chain
        )
    completions = [
        completion_hashes(job, one.token_ids, facts.images) for one in generated.completions
    ]
    return chain + b"".join(completions)
