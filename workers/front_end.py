"""What a worker keeps of each front end: its jobs, their load, and what it must hear."""

import asyncio
from dataclasses import dataclass, field

from titopool.messages import Completed, Failed, Job, JobId, Part

# Job id and attempt.
JobKey = tuple[JobId, int]


@dataclass
class FrontEnd:
    """A gunicorn process that said Hello."""

    last_hello: float
    jobs: dict[JobKey, Job] = field(default_factory=dict)
    tasks: dict[JobKey, asyncio.Task[None]] = field(default_factory=dict)
    # Of all its jobs: completions, and tokens at most.
    num_sequences: int = 0
    num_tokens: int = 0
    outbox: list[Completed | Failed | Part] = field(default_factory=list)
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
