"""What the pool keeps of each worker and of each job that has not ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.pool.pending import Request
from app.pool.prefix_index import PrefixIndex
from titopool.wire.messages import NO_LOAD, Heartbeat, Job, Load, WorkerFacts

# Jobs sent ahead of free places in the engine, so that it never waits for the next one.
WINDOW_FACTOR = 1.25


@dataclass
class Worker:
    """One endpoint and the process that answers there, if any."""

    endpoint: str
    last_seen: float
    # The last one of the process that is there; None: there is none.
    heartbeat: Heartbeat | None = None
    # Its own phase, unless the pool knows a reason to send it no jobs.
    phase: str = "unreachable"
    # That reason; "": its own phase says all.
    reason: str = ""
    # Jobs that this front end has sent and that have not ended, by job id.
    jobs: dict[int, "OpenJob"] = field(default_factory=dict)
    num_sequences: int = 0
    num_tokens: int = 0
    # What the other front ends have in flight here.
    load_of_others: Load = NO_LOAD
    # Tokens of jobs that were sent here since `others` was told.
    num_tokens_since: int = 0
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    # LoRA adapters that it has in the version that the pool serves.
    adapters: set[str] = field(default_factory=set)

    @property
    def facts(self) -> WorkerFacts | None:
        """The engine's facts while it takes jobs, else None."""
        beat = self.heartbeat
        return beat.facts if beat is not None and self.phase == "ready" else None

    @property
    def load(self) -> int:
        """Tokens that all front ends have in flight here, at most.

        What the others have sent since they were last told of is not known; they are taken to
        have done as this one did. Without that, all would send to a worker that reports late,
        which would report later still.
        """
        num_others = self.heartbeat.num_front_ends - 1 if self.heartbeat else 0
        unknown = max(0, num_others) * self.num_tokens_since
        return self.num_tokens + self.load_of_others.other_tokens + unknown

    @property
    def num_slots(self) -> float:
        """This front end's share of the sequences that the engine runs at once."""
        beat = self.heartbeat
        return self.facts.max_num_seqs / max(1, beat.num_front_ends) if beat and self.facts else 0

    def has_adapter_of(self, job: Job) -> bool:
        """Whether the LoRA adapter of `job`, if it has one, serves here."""
        return not job.adapter or job.adapter in self.adapters

    def has_room_for(self, job: Job, *, ahead: bool) -> bool:
        """Whether the engine can run `job` at once or, if `ahead`, soon.

        What other front ends leave free is this one's, and its fair share in any case: a
        backlog of theirs does not shut it out. A job wider than that may run alone.
        """
        facts, beat = self.facts, self.heartbeat
        if facts is None or beat is None or not self.has_adapter_of(job):
            return False
        window = facts.max_num_seqs * (WINDOW_FACTOR if ahead else 1)
        mine = max(
            window - self.load_of_others.other_sequences, window / max(1, beat.num_front_ends)
        )
        return self.num_sequences == 0 or self.num_sequences + job.num_sequences <= mine

    def add(self, open_job: "OpenJob") -> None:
        self.jobs[open_job.job.job_id] = open_job
        self.num_sequences += open_job.job.num_sequences
        self.num_tokens += open_job.job.num_tokens
        self.num_tokens_since += open_job.job.num_tokens
        self.prefixes.record(open_job.digests)

    def hear(self, others: Load) -> None:
        """Takes what the worker says of the other front ends."""
        self.load_of_others, self.num_tokens_since = others, 0

    def remove(self, job_id: int) -> "OpenJob":
        open_job = self.jobs.pop(job_id)
        self.num_sequences -= open_job.job.num_sequences
        self.num_tokens -= open_job.job.num_tokens
        return open_job


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job with the request that waits for it and its index there."""

    job: Job
    request: Request
    index: int
    # Of the prompt's blocks.
    digests: Sequence[int] = ()
    # Workers that died while they ran it.
    num_deaths: int = 0
