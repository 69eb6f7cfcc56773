"""What one front-end process knows of the workers, and which job goes where.

Pure state: no sockets, no threads, no clock of its own; only the link touches it
(`app/link.py`), tests drive it by hand. What the pool itself knows (phase, weight version,
load by others) comes from the workers' heartbeats.

A job has exactly one end: its request is told once, whatever comes later.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from app.placement import ByPrefix, Policy
from app.prefix_index import PrefixIndex, as_integers
from app.request import Request
from titopool.errors import ERRORS_BY_CODE, GenerationFailed, NoReadyWorker, TitopoolError
from titopool.messages import NO_LOAD, Completed, Failed, Heartbeat, Job, Load, Part, WorkerFacts

logger = logging.getLogger(__name__)

# A job is sent to a second worker when the first dies, and to no third.
MAX_DEATHS = 2
# Of the workers' engines, which must be alike.
COMPARED_FACTS = (
    "model", "vocab_size", "max_model_len", "max_logprobs", "world_size", "tool_call_parser",
    "reasoning_parser",
)  # fmt: skip
# Jobs sent ahead of free places in the engine, so that it never waits for the next one.
WINDOW_FACTOR = 1.25


@dataclass
class Worker:
    """One endpoint and the process that answers there, if any."""

    endpoint: str
    last_seen: float
    heartbeat: Heartbeat | None = None
    # Jobs that this front end has sent and that have not ended, by job id.
    jobs: dict[int, "OpenJob"] = field(default_factory=dict)
    num_sequences: int = 0
    num_tokens: int = 0
    # What the other front ends have under way here.
    others: Load = NO_LOAD
    # Tokens of jobs that were sent here since `others` was told.
    num_tokens_since: int = 0
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)

    @property
    def facts(self) -> WorkerFacts | None:
        """The engine's facts once it is ready, else None."""
        beat = self.heartbeat
        return beat.facts if beat is not None and beat.phase == "ready" else None

    @property
    def load(self) -> int:
        """Tokens that all front ends have under way here, at most.

        What the others have sent since they were last told of is not known; they are taken to
        have done as this one did. Without that, all would send to a worker that reports late,
        which would report later still.
        """
        num_others = self.heartbeat.num_front_ends - 1 if self.heartbeat else 0
        unknown = max(0, num_others) * self.num_tokens_since
        return self.num_tokens + self.others.other_tokens + unknown

    @property
    def num_places(self) -> float:
        """This front end's share of the sequences that the engine runs at once."""
        beat = self.heartbeat
        return self.facts.max_num_seqs / max(1, beat.num_front_ends) if beat and self.facts else 0

    def has_room_for(self, job: Job, *, ahead: bool) -> bool:
        """Whether the engine can run `job` at once or, if `ahead`, soon.

        What other front ends leave free is this one's, and its fair share in any case: a
        backlog of theirs does not shut it out. A job wider than that may run alone.
        """
        facts, beat = self.facts, self.heartbeat
        if facts is None or beat is None:
            return False
        window = facts.max_num_seqs * (WINDOW_FACTOR if ahead else 1)
        mine = max(window - self.others.other_sequences, window / max(1, beat.num_front_ends))
        return self.num_sequences == 0 or self.num_sequences + job.num_sequences <= mine

    def add(self, open_job: "OpenJob") -> None:
        self.jobs[open_job.job.job_id] = open_job
        self.num_sequences += open_job.job.num_sequences
        self.num_tokens += open_job.job.num_tokens
        self.num_tokens_since += open_job.job.num_tokens
        self.prefixes.record(open_job.digests)

    def hear(self, others: Load) -> None:
        """Takes what the worker says of the other front ends."""
        self.others, self.num_tokens_since = others, 0

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


class Assignment(NamedTuple):
    """Jobs to send to one worker."""

    worker: Worker
    jobs: list[Job]


class Pool:
    """All workers, the jobs under way and those that wait."""

    def __init__(self, *, no_worker_timeout_s: float, policy: Policy | None = None):
        self._policy = policy or ByPrefix()
        self.workers: dict[str, Worker] = {}
        self.waiting: deque[OpenJob] = deque()
        self.num_open_jobs = 0
        self._failed: list[Request] = []
        self._no_worker_timeout_s = no_worker_timeout_s
        self._without_worker_since: float | None = None
        # Of the workers' weights, the latest ever seen: one that has had fewer takes no jobs.
        self.num_updates = 0

    # ---- workers ---------------------------------------------------------------------

    def add_worker(self, endpoint: str, now: float) -> None:
        self.workers[endpoint] = Worker(endpoint, last_seen=now)

    def remove_worker(self, endpoint: str) -> None:
        """Forgets an endpoint that is not part of the pool any more."""
        self.lose_worker(endpoint, "its address is gone", has_died=False)
        del self.workers[endpoint]

    def on_heartbeat(self, endpoint: str, beat: Heartbeat, now: float) -> None:
        worker = self.workers[endpoint]
        known = worker.heartbeat
        if known is not None and known.incarnation != beat.incarnation:
            self.lose_worker(endpoint, "it has restarted")
        if beat.facts is not None and (odd := self._difference(endpoint, beat.facts)):
            beat = msgspec.structs.replace(beat, phase="mismatched", facts=None)
            if known is None or known.phase != beat.phase:
                logger.error("worker %s at %s takes no jobs: %s", beat.worker_id, endpoint, odd)
        elif beat.num_updates < self.num_updates and beat.phase == "ready":
            beat = msgspec.structs.replace(beat, phase="stale")
            if known is None or known.phase != beat.phase:
                logger.info("worker %s at %s has older weights", beat.worker_id, endpoint)
        elif known is None or known.phase != beat.phase:
            logger.info("worker %s at %s: %s", beat.worker_id, endpoint, beat.phase)
        self.num_updates = max(self.num_updates, beat.num_updates)
        if known is not None and weights_of(known) != weights_of(beat):
            # What was cached was computed with other weights.
            worker.prefixes.clear()
        elif beat.prefixes:
            worker.prefixes.record(as_integers(beat.prefixes))
        if beat.facts is not None:
            worker.prefixes.resize(beat.facts.num_cache_tokens)
        worker.heartbeat, worker.last_seen = beat, now
        worker.hear(Load(beat.other_sequences, beat.other_tokens))

    def on_load(self, endpoint: str, load: Load) -> None:
        self.workers[endpoint].hear(load)

    def _difference(self, endpoint: str, facts: WorkerFacts) -> str:
        """What tells a worker's model from that of the others that are ready; "" if nothing."""
        for other in self.workers.values():
            if other.endpoint == endpoint or other.facts is None:
                continue
            for name in COMPARED_FACTS:
                mine, theirs = getattr(facts, name), getattr(other.facts, name)
                if mine != theirs:
                    return f"its {name} is {mine}, that of {other.endpoint} is {theirs}"
        return ""

    def lose_worker(self, endpoint: str, reason: str, *, has_died: bool = True) -> None:
        """Takes a worker's jobs back: they wait for another, or fail on the second death.

        Args:
            has_died: False when it was stopped on purpose, for which no job is to blame.
        """
        worker = self.workers[endpoint]
        if worker.heartbeat is not None:
            logger.warning(
                "worker %s at %s is lost with %d jobs open: %s",
                worker.heartbeat.worker_id, endpoint, len(worker.jobs), reason,
            )  # fmt: skip
        worker.heartbeat = None
        worker.hear(NO_LOAD)
        worker.prefixes.clear()
        for job_id in list(worker.jobs):
            self._send_again(worker.remove(job_id), reason, has_died)

    def _send_again(self, open_job: OpenJob, reason: str, has_died: bool) -> None:
        num_deaths = open_job.num_deaths + has_died
        if num_deaths >= MAX_DEATHS:
            self._fail(
                open_job,
                GenerationFailed(
                    f"{open_job.request.place_of(open_job.index)}: {num_deaths} workers died while they ran it "
                    f"(the last: {reason}); it is not tried again"
                ),
            )
            return
        if open_job.request.has_parts(open_job.index):
            # It would sample other tokens than those that the client has.
            self._fail(
                open_job,
                GenerationFailed(
                    f"{open_job.request.place_of(open_job.index)}: its worker is gone amid the stream ({reason}); send "
                    "the request again"
                ),
            )
            return
        again = msgspec.structs.replace(open_job.job, attempt=open_job.job.attempt + 1)
        # To the front: it has waited longest.
        self.waiting.appendleft(dataclasses.replace(open_job, job=again, num_deaths=num_deaths))

    # ---- jobs ------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Lets all jobs of `request` wait for a worker."""
        self.num_open_jobs += len(request.jobs)
        self.waiting.extend(
            OpenJob(job, request, index, as_integers(job.prefix))
            for index, job in enumerate(request.jobs)
        )

    def assign(self) -> list[Assignment]:
        """Takes waiting jobs to ready workers that have room, as the policy says."""
        ready = [worker for worker in self.workers.values() if worker.facts is not None]
        chosen: dict[str, Assignment] = {}
        while self.waiting and ready:
            choice = self._policy.choose(self.waiting, ready)
            if choice is None:
                break
            worker, open_job = choice.worker, self.waiting[choice.place]
            del self.waiting[choice.place]
            worker.add(open_job)
            assignment = chosen.setdefault(worker.endpoint, Assignment(worker, []))
            assignment.jobs.append(open_job.job)
        return list(chosen.values())

    def on_results(self, endpoint: str, results: Iterable[Completed | Failed | Part]) -> None:
        """Hands results to their requests; drops those of an attempt that was lost."""
        worker = self.workers[endpoint]
        for result in results:
            open_job = worker.jobs.get(result.job_id)
            if open_job is None or open_job.job.attempt != result.attempt:
                continue
            if isinstance(result, Part):
                open_job.request.add_part(open_job.index, result)
                continue
            worker.remove(result.job_id)
            if isinstance(result, Failed):
                error_type = ERRORS_BY_CODE.get(result.code, GenerationFailed)
                text = f"{open_job.request.place_of(open_job.index)}: {result.message}"
                self._fail(open_job, error_type(text, param=result.param))
            else:
                if result.prefix:
                    worker.prefixes.record([*open_job.digests, *as_integers(result.prefix)])
                self.num_open_jobs -= 1
                open_job.request.complete(open_job.index, result)

    def _fail(self, open_job: OpenJob, error: TitopoolError) -> None:
        self.num_open_jobs -= 1
        if open_job.request.fail(error):
            self._failed.append(open_job.request)

    def take_failed(self) -> list[Request]:
        """Requests that failed since the last call; their other jobs may still run."""
        failed, self._failed = self._failed, []
        return failed

    def drop_done(self, request: Request) -> list[tuple[Worker, list[tuple[int, int]]]]:
        """Takes back the jobs of a failed or cancelled request.

        Returns:
            What to abort: for each worker, (job id, attempt) pairs.
        """
        aborts = []
        num_under_way = 0
        for worker in self.workers.values():
            mine = [job.job_id for job in request.jobs if job.job_id in worker.jobs]
            if mine:
                keys = [(job_id, worker.remove(job_id).job.attempt) for job_id in mine]
                num_under_way += len(keys)
                aborts.append((worker, keys))
        num_waiting = 0
        if num_under_way < request.num_open:
            # Only then: the queue can be long.
            others = deque(one for one in self.waiting if one.request is not request)
            num_waiting, self.waiting = len(self.waiting) - len(others), others
        self.num_open_jobs -= num_under_way + num_waiting
        return aborts

    def open_requests(self) -> list[Request]:
        """Every request with a job under way or waiting."""
        under_way = [job for worker in self.workers.values() for job in worker.jobs.values()]
        return [job.request for job in (*under_way, *self.waiting)]

    # ---- time ------------------------------------------------------------------------

    def forgive_silence(self, now: float) -> None:
        """Counts silence from now on."""
        for worker in self.workers.values():
            worker.last_seen = now

    def silent_workers(self, now: float, timeout_s: float) -> list[Worker]:
        """Workers that were there and have not been heard of for `timeout_s`."""
        return [
            worker
            for worker in self.workers.values()
            if worker.heartbeat is not None and now - worker.last_seen > timeout_s
        ]

    def fail_if_abandoned(self, now: float) -> None:
        """Fails what waits when no worker has been ready for too long."""
        if any(worker.facts is not None for worker in self.workers.values()):
            self._without_worker_since = None
            return
        if self._without_worker_since is None:
            self._without_worker_since = now
        if now - self._without_worker_since < self._no_worker_timeout_s:
            return
        while self.waiting:
            self._fail(
                self.waiting.popleft(),
                NoReadyWorker(
                    f"no worker has been ready for {self._no_worker_timeout_s:g} s "
                    "(worker_start_timeout_s)"
                ),
            )


def weights_of(beat: Heartbeat) -> tuple[int, int]:
    """Changes when a worker gets other weights, also of the same version."""
    return beat.weight_version, beat.num_updates
