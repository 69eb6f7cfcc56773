"""What the pool keeps of each worker, and of each job until the job ends."""

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from app.pool.prefix_index import PrefixIndex, as_integers
from app.pool.request import Request
from titopool.wire.messages import (
    NO_LOAD,
    Chunk,
    Completed,
    Completion,
    Heartbeat,
    Job,
    Load,
    WorkerFacts,
)

# Jobs sent per slot of the engine, so that a free slot never waits for the next job.
WINDOW_FACTOR = 1.25


@dataclass
class Worker:
    """One endpoint, and the worker process that answers there, if any."""

    endpoint: str
    # Monotonic time of the last heartbeat, or of the addition to the pool.
    last_seen: float
    # Last heartbeat of the present process; None while no process answers.
    heartbeat: Heartbeat | None = None
    # The phase in the heartbeat, unless the pool excludes the worker (`app/pool/pool_view.py`).
    phase: str = "unreachable"
    # Why the pool excludes the worker; "" if the phase says it all.
    reason: str = ""
    # Open jobs that this front end has sent here, by job id, and their totals.
    jobs: dict[int, "OpenJob"] = field(default_factory=dict)
    num_sequences: int = 0
    num_tokens: int = 0
    # What other front ends have in flight here, as last reported.
    load_of_others: Load = NO_LOAD
    # Tokens of the jobs that this front end has sent since that report.
    num_tokens_since_report: int = 0
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    # Names of the LoRA adapters that the worker has in the pool's version.
    adapters: set[str] = field(default_factory=set)

    @property
    def facts(self) -> WorkerFacts | None:
        """The engine's facts while the worker takes jobs, else None."""
        beat = self.heartbeat
        return beat.facts if beat is not None and self.phase == "ready" else None

    @property
    def load(self) -> int:
        """Upper estimate of the tokens that all front ends have in flight here.

        Jobs that other front ends have sent since the last report are unknown. Each of those
        front ends is assumed to have sent as much as this one. Otherwise all front ends would
        send to the worker that reports late, and delay its reports further.
        """
        num_others = self.heartbeat.num_front_ends - 1 if self.heartbeat else 0
        unreported = max(0, num_others) * self.num_tokens_since_report
        return self.num_tokens + self.load_of_others.other_tokens + unreported

    @property
    def num_slots(self) -> float:
        """This front end's share of the engine's slots."""
        beat = self.heartbeat
        return self.facts.max_num_seqs / max(1, beat.num_front_ends) if beat and self.facts else 0

    def has_adapter_of(self, job: Job) -> bool:
        """Whether the worker serves the LoRA adapter of `job`, if `job` has one."""
        return not job.adapter or job.adapter in self.adapters

    def has_room_for(self, job: Job, *, ahead: bool) -> bool:
        """Whether the engine can start `job` now or, if `ahead`, soon.

        A front end may use all slots that other front ends leave free, and always its fair
        share, so that a backlog of others does not block it. A job with more completions than
        that is sent when this front end has no other job here.
        """
        facts, beat = self.facts, self.heartbeat
        if facts is None or beat is None or not self.has_adapter_of(job):
            return False
        window = facts.max_num_seqs * (WINDOW_FACTOR if ahead else 1)
        fair_share = window / max(1, beat.num_front_ends)
        limit = max(window - self.load_of_others.other_sequences, fair_share)
        return self.num_sequences == 0 or self.num_sequences + job.num_sequences <= limit

    def add(self, open_job: "OpenJob") -> None:
        """Counts a job that is sent to this worker."""
        self.jobs[open_job.job.job_id] = open_job
        self.num_sequences += open_job.job.num_sequences
        self.num_tokens += open_job.job.num_tokens
        self.num_tokens_since_report += open_job.job.num_tokens
        self.prefixes.record(open_job.digests)

    def remove(self, job_id: int) -> "OpenJob":
        """Removes a job that has ended here."""
        open_job = self.jobs.pop(job_id)
        self.num_sequences -= open_job.job.num_sequences
        self.num_tokens -= open_job.job.num_tokens
        return open_job

    def record_load_of_others(self, load: Load) -> None:
        self.load_of_others, self.num_tokens_since_report = load, 0

    def record_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Records a heartbeat of the present process, or the first one of a new process."""
        last = self.heartbeat
        self.heartbeat, self.last_seen = beat, now
        self.record_load_of_others(Load(beat.other_sequences, beat.other_tokens))
        if last is not None and last.weights.order != beat.weights.order:
            # The cached blocks were computed with other weights.
            self.prefixes.clear()
        elif beat.prefixes:
            self.prefixes.record(as_integers(beat.prefixes))
        if beat.facts is not None:
            self.prefixes.resize(beat.facts.num_cache_tokens)

    def forget_process(self) -> None:
        """Forgets what is only true of a process that is lost; its jobs stay."""
        self.heartbeat, self.phase, self.reason = None, "unreachable", ""
        self.record_load_of_others(NO_LOAD)
        self.prefixes.clear()


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that has not ended, its request, and its index in the request."""

    job: Job
    request: Request
    index: int
    # Of the prompt's blocks (`titopool/wire/prefixes.py`).
    digests: Sequence[int] = ()
    # How many workers died while they ran this job.
    num_deaths: int = 0

    @property
    def location(self) -> str:
        """Where the prompt stood in the client's body."""
        return self.request.locations[self.index]

    def end_as_aborted(self, version: int, adapter_version: int | None) -> None:
        """Completes the job without a token; `version` is that of the weights that serve."""
        job = self.job
        completion = Completion(b"", "abort", None, [(version, 0)])
        if job.is_streamed:
            pieces = [(index, completion) for index in range(job.num_sequences)]
            chunk = Chunk(job.job_id, job.attempt, pieces, adapter_version=adapter_version)
            self.request.add_chunk(self.index, chunk)
        result = Completed(
            job.job_id, job.attempt, [completion] * job.num_sequences, 0,
            adapter_version=adapter_version,
        )  # fmt: skip
        self.request.complete(self.index, result)

    def next_attempt(self, num_deaths: int) -> "OpenJob":
        """The same job with a new attempt number: results of earlier attempts are dropped."""
        job = msgspec.structs.replace(self.job, attempt=self.job.attempt + 1)
        return dataclasses.replace(self, job=job, num_deaths=num_deaths)


class WaitingJobs:
    """The queue of jobs that wait for a worker. Any job can be removed in constant time."""

    def __init__(self) -> None:
        # By job id, first to last.
        self._jobs: OrderedDict[int, OpenJob] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._jobs.values())

    @property
    def first(self) -> OpenJob:
        return next(iter(self))

    def append(self, open_job: OpenJob) -> None:
        self._jobs[open_job.job.job_id] = open_job

    def prepend(self, open_jobs: Sequence[OpenJob]) -> None:
        """Puts jobs before all others, in their order."""
        for open_job in reversed(open_jobs):
            self._jobs[open_job.job.job_id] = open_job
            self._jobs.move_to_end(open_job.job.job_id, last=False)

    def remove(self, job_id: int) -> OpenJob | None:
        """Removes a job and returns it; None if it does not wait."""
        return self._jobs.pop(job_id, None)

    def remove_all(self) -> list[OpenJob]:
        """Empties the queue and returns its jobs in order."""
        removed = list(self)
        self._jobs.clear()
        return removed


@lru_cache(maxsize=1024)
def natural_order(endpoint: str) -> list[int | str]:
    """A sort key that puts worker-2 before worker-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", endpoint)]
