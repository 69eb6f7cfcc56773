"""Routing policies: which waiting job is sent next, and to which worker.

`app/pool/state.py` asks the policy for one job at a time and keeps the workers' loads and prefixes.
To add a policy: a class here, an entry in `ROUTING_POLICIES`, and the name in
`titopool.settings.config.PLACEMENTS` (the setting `placement`).
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import ClassVar, NamedTuple, Protocol

from app.pool.records import OpenJob, WaitingJobs, Worker

# The load by which a worker that holds the whole prompt may exceed the least loaded worker, in
# mean loads. In `benchmarks/placement.py`, conversations on 8 workers found four points less of
# their prompts cached at 0.25, and one point more at 1.
AFFINITY_SLACK = 0.5
# A worker that holds this share of a prompt is the prompt's home.
HOME_SHARE = 0.5
# How many waiting jobs are searched for one whose home has room.
MAX_LOOKED_AT = 64
# How often the first waiting job may be passed over.
MAX_PASSED_OVER = 32


class Placed(NamedTuple):
    """A waiting job and the worker that it is sent to."""

    worker: Worker
    open_job: OpenJob


class RoutingPolicy(Protocol):
    """Chooses workers for jobs. Each pool has an instance, so a policy may keep state."""

    # Whether `choose` reads prefixes, so that jobs must bring the digests of their prompts.
    needs_prefixes: ClassVar[bool]
    # By what it chooses among workers that are equal otherwise, for /metrics.
    reason: ClassVar[str]

    def choose(
        self,
        first: OpenJob,
        waiting: WaitingJobs,
        candidates: Sequence[Worker],
        ready: Sequence[Worker],
    ) -> Placed:
        """The next assignment.

        Args:
            first: the next of the waiting jobs.
            candidates: the ready workers with room for it; at least one.
            ready: all workers that take jobs.
        """


class LeastLoaded:
    """Sends the first job to the worker with the fewest tokens in flight."""

    needs_prefixes: ClassVar[bool] = False
    reason: ClassVar[str] = "least_loaded"

    def choose(
        self,
        first: OpenJob,
        waiting: WaitingJobs,
        candidates: Sequence[Worker],
        ready: Sequence[Worker],
    ) -> Placed:
        return Placed(min(candidates, key=lambda worker: worker.load), first)


class RoundRobin:
    """Sends the first job to each worker in turn."""

    needs_prefixes: ClassVar[bool] = False
    reason: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(
        self,
        first: OpenJob,
        waiting: WaitingJobs,
        candidates: Sequence[Worker],
        ready: Sequence[Worker],
    ) -> Placed:
        self._num_chosen += 1
        return Placed(candidates[(self._num_chosen - 1) % len(candidates)], first)


class PrefixAffinity:
    """Sends prompts to workers that have their prefixes cached or their sessions, within limits of
    load.

    While all workers have room, the first job goes to `best_worker`. Once some workers are full
    and the first job's home is one of them, the first job is passed over: a free slot elsewhere
    goes to a job that has its home there, or to a job without a home. Otherwise jobs would
    follow free slots instead of cached prefixes. Without cache hits and sessions the policy equals
    `LeastLoaded`.
    """

    needs_prefixes: ClassVar[bool] = True
    reason: ClassVar[str] = "least_loaded"

    def __init__(self) -> None:
        # The first job of the queue, and how often other jobs were sent before it.
        self._first: OpenJob | None = None
        self._num_passed_over = 0

    def choose(
        self,
        first: OpenJob,
        waiting: WaitingJobs,
        candidates: Sequence[Worker],
        ready: Sequence[Worker],
    ) -> Placed:
        worker = best_worker(first, candidates, ready)
        is_any_full = len(candidates) < len(ready)
        if not is_any_full or is_home(worker, first) or not has_home(first, ready):
            return Placed(worker, first)
        if first is not self._first:
            self._first, self._num_passed_over = first, 0
        if self._num_passed_over == MAX_PASSED_OVER:
            return Placed(worker, first)
        chosen = _job_for(worker, first, waiting, ready)
        self._num_passed_over += chosen is not first
        return Placed(worker, chosen)


# By the values of the setting `placement`.
ROUTING_POLICIES: dict[str, type[RoutingPolicy]] = {
    "prefix": PrefixAffinity,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}


def reason_of(
    worker: Worker, open_job: OpenJob, ready: Sequence[Worker], policy: RoutingPolicy
) -> str:
    """Why a job goes to `worker`, before it is added there, for /metrics.

    Returns:
        "requeued" after a lost worker, "render" for a job without completions, "prefix" if the
        worker holds the first block of the prompt, "session" at the session's own worker, else the
        policy's reason.
    """
    if open_job.job.attempt > 1:
        return "requeued"
    if not open_job.job.num_sequences:
        return "render"
    if policy.needs_prefixes:
        if open_job.digests and worker.prefixes.holds(open_job.digests[0]):
            return "prefix"
        session = open_job.request.session
        if session and session_worker(session, ready) is worker:
            return "session"
    return policy.reason


def workers_with_room(open_job: OpenJob, ready: Sequence[Worker], *, is_new: bool) -> list[Worker]:
    """The workers that can start a job now; `is_new`: its request has had no whole turn."""
    return [worker for worker in ready if worker.has_room_for(open_job, is_new=is_new)]


def best_worker(open_job: OpenJob, candidates: Sequence[Worker], ready: Sequence[Worker]) -> Worker:
    """The candidate that holds most of the prompt, unless its load is too high.

    Its load may exceed the least load by `AFFINITY_SLACK` times the mean load, times the share
    of the prompt that it holds. So a short prefix counts little, a prefix that all prompts share
    spreads over all workers, and an idle worker gets work. Ties go to the least loaded worker.

    The worker of the job's session counts as one that holds the whole prompt, unless another
    candidate holds more of it: then the session has been there while its own worker was too busy.
    """
    least = min(candidates, key=lambda worker: worker.load)
    digests, session = open_job.digests, open_job.request.session
    if len(candidates) == 1 or not (digests or session):
        return least
    mean_load = sum(worker.load for worker in ready) / len(ready)
    # A prompt shorter than a block counts as one block.
    num_blocks = len(digests) or 1
    slack = AFFINITY_SLACK * mean_load / num_blocks
    found = {worker.endpoint: worker.prefixes.num_found(digests) for worker in candidates}
    if session:
        own = session_worker(session, ready).endpoint
        if found.get(own) == max(found.values()):
            found[own] = num_blocks
    best, most_found = least, found[least.endpoint]
    for worker in candidates:
        num_found = found[worker.endpoint]
        if worker.load - least.load > slack * num_found:
            continue
        if num_found > most_found or (num_found == most_found and worker.load < best.load):
            best, most_found = worker, num_found
    return best


def place_render(renders: WaitingJobs, candidates: Sequence[Worker]) -> Placed:
    """Sends the first render to the worker that has the fewest: a render loads its threads only."""
    worker = min(candidates, key=lambda worker: (worker.num_renders, worker.load))
    return Placed(worker, renders.first)


def place_new(open_job: OpenJob, candidates: Sequence[Worker], ready: Sequence[Worker]) -> Placed:
    """Sends the job of a new request to one of the slots that are kept for such."""
    return Placed(best_worker(open_job, candidates, ready), open_job)


def session_worker(session: str, ready: Sequence[Worker]) -> Worker:
    """The worker that a session belongs to, by rendezvous hashing.

    It is the same in every front end. When a worker is lost or returns, only its sessions move.
    """
    return max(
        ready,
        key=lambda worker: blake2b(f"{worker.endpoint} {session}".encode(), digest_size=8).digest(),
    )


def is_home(worker: Worker, open_job: OpenJob) -> bool:
    """Whether `worker` holds at least `HOME_SHARE` of the prompt."""
    digests = open_job.digests
    # A worker holds every block before one that it holds, so one look-up is enough.
    return bool(digests) and worker.prefixes.holds(digests[int(HOME_SHARE * (len(digests) - 1))])


def has_home(open_job: OpenJob, ready: Sequence[Worker]) -> bool:
    """Whether any worker is the prompt's home."""
    return any(is_home(worker, open_job) for worker in ready)


def _job_for(
    worker: Worker, first: OpenJob, waiting: WaitingJobs, ready: Sequence[Worker]
) -> OpenJob:
    """The job for a free slot of `worker` when the first job has its home elsewhere.

    The first job with its home at `worker`, else the first job without a home, else the first.
    """
    without_home = None
    for open_job in islice(waiting, MAX_LOOKED_AT):
        is_home_here = is_home(worker, open_job)
        if not is_home_here and (without_home or has_home(open_job, ready)):
            continue
        if worker.has_room_for(open_job, is_new=waiting.is_new(open_job)):
            if is_home_here:
                return open_job
            without_home = open_job
    return without_home or first
