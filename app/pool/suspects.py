"""Which job ended a worker: suspects run apart until one of them does it again.

A worker that dies does not say which job was the cause. Suspects are the jobs without a token, those
with a grammar, which is read at every token, and those that were at two deaths. They go apart to a
worker without other jobs of this front end, and front ends take turns there. A job that had no token
when its worker died runs alone until it has one. The others run in groups until their end, and a
group whose worker dies is split. So the cause fails alone, after it has ended two workers if it ends
them before its first token. No other job fails for it.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from app.pool.records import OpenJob, Worker
from titopool.settings.sampling import has_grammar
from titopool.wire.messages import Apart

# A group of suspects that is split has so many parts.
NUM_PARTS = 8
# A worker that was lost sends heartbeats again within this time, or is not started again.
RESTART_S = 30.0
# A job that was alone at so many deaths fails, whatever other front ends had there.
MAX_DEATHS = 4


class Verdict(NamedTuple):
    """What becomes of the jobs of a lost worker."""

    # The job that ended the worker, if that is known.
    cause: OpenJob | None
    # The other jobs, in order; a suspect has a `group_size`.
    others: list[OpenJob]


class Suspects:
    """Suspects that wait, and the group of them that runs apart."""

    def __init__(self) -> None:
        # By job id, first to last.
        self._waiting: OrderedDict[int, OpenJob] = OrderedDict()
        # The worker of the present group, and its job ids.
        self._endpoint = ""
        self._group: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._waiting.values())

    @property
    def first(self) -> OpenJob:
        return next(iter(self))

    def remove(self, job_id: int) -> OpenJob | None:
        """Removes a job and returns it; None if it does not wait."""
        return self._waiting.pop(job_id, None)

    def remove_all(self) -> list[OpenJob]:
        removed = list(self)
        self._waiting.clear()
        return removed

    def add(self, suspects: list[OpenJob]) -> None:
        """Puts suspects before all others; the likely ones first."""
        likely = sorted(suspects, key=lambda one: (one.until_end, not has_grammar(one.job)))
        for open_job in reversed(likely):
            self._waiting[open_job.job.job_id] = open_job
            self._waiting.move_to_end(open_job.job.job_id, last=False)

    # ---- running apart ---------------------------------------------------------------

    def running(self, worker: Worker) -> list[OpenJob]:
        """The suspects that run apart at `worker` and are not cleared yet."""
        if worker.endpoint != self._endpoint:
            return []
        jobs = [worker.jobs[job_id] for job_id in self._group if job_id in worker.jobs]
        return [one for one in jobs if one.until_end or one.job.job_id not in worker.with_token]

    def until_of(self, worker: Worker) -> Apart:
        """Until when the suspects at `worker` run apart; "" if none do."""
        running = self.running(worker)
        return "" if not running else "end" if running[0].until_end else "token"

    def worker_of(self, workers: Collection[Worker]) -> Worker | None:
        """The worker that is kept for suspects now.

        A worker without jobs of this front end; while none is, and none starts, the one with the
        fewest, which then gets no more of them. Suspects that run until their end wait for a worker
        that starts rather than take the only one that serves.
        """
        present = next((one for one in workers if one.endpoint == self._endpoint), None)
        if present is not None and self.running(present):
            return present
        if not self._waiting:
            self._endpoint = ""
            return None
        first = self.first
        ready = [one for one in workers if one.facts and one.has_adapter_of(first.job)]
        best = present if present in ready else min(
            ready,
            key=lambda one: (bool(one.jobs), one.load_of_others.other_sequences, one.num_sequences),
            default=None,
        )  # fmt: skip
        if best is None or not _is_any_starting(workers):
            return best
        is_only_one = not any(one.facts and one is not best for one in workers)
        is_busy = bool(best.jobs) and best is not present
        return None if is_busy or (first.until_end and is_only_one) else best

    def take_group(self, worker: Worker) -> list[OpenJob]:
        """The next group for `worker`, which `worker_of` returned; empty if it is not its turn."""
        is_present = worker.endpoint == self._endpoint
        if self.running(worker) or (worker.jobs and not is_present):
            return []
        first = self.first
        alike = [
            one
            for one in self
            if one.until_end == first.until_end and one.job.adapter == first.job.adapter
        ]
        group = alike[: first.group_size]
        for open_job in group:
            del self._waiting[open_job.job.job_id]
        self._endpoint, self._group = worker.endpoint, {one.job.job_id for one in group}
        return group

    # ---- judging ---------------------------------------------------------------------

    def judge(self, worker: Worker, *, blames_jobs: bool) -> Verdict:
        """Finds the cause of a worker's end, or the suspects; ends the group's run there.

        Args:
            worker: with its jobs, as it was when it was lost.
            blames_jobs: False if the worker was stopped on purpose, so that no job is the cause.
        """
        jobs, group = list(worker.jobs.values()), _ids(self.running(worker))
        if worker.endpoint == self._endpoint:
            self._endpoint, self._group = "", set()
        if not blames_jobs:
            return Verdict(None, [_as_before(one, is_suspect=_id(one) in group) for one in jobs])
        ran = [one.with_death() for one in jobs if _was_in_engine(one, worker, group)]
        suspects = [one for one in ran if _id(one) in group]
        is_apart = bool(group) and not any(
            _id(one) not in worker.with_token or has_grammar(one.job)
            for one in ran
            if _id(one) not in group
        )
        if is_apart and len(group) == len(suspects) == 1 and _is_proved(suspects[0], worker):
            others = [one.next_attempt() for one in jobs if _id(one) not in group]
            return Verdict(suspects[0], others)
        if not is_apart:
            suspects = [one for one in ran if _may_be_cause(one, worker)]
        charged = {_id(one): one for one in (suspects if is_apart else ran)}
        suspected = _ids(suspects)
        size = max(1, len(suspected & worker.with_token) // NUM_PARTS)
        return Verdict(None, [
            _suspected(charged[_id(one)], worker, size) if _id(one) in suspected
            else _as_before(charged.get(_id(one), one), is_suspect=_id(one) in group)
            for one in jobs
        ])  # fmt: skip


def _is_any_starting(workers: Collection[Worker]) -> bool:
    """Whether a worker loads its engine, or was lost so recently that it may start again."""
    newest_s = max(one.last_seen for one in workers)
    return any(
        one.heartbeat.facts is None if one.heartbeat else newest_s - one.last_seen < RESTART_S
        for one in workers
    )


def _id(open_job: OpenJob) -> int:
    return open_job.job.job_id


def _ids(open_jobs: Iterable[OpenJob]) -> set[int]:
    return {_id(one) for one in open_jobs}


def _was_in_engine(open_job: OpenJob, worker: Worker, group: set[int]) -> bool:
    """Whether a job may have been in the engine of `worker`, where `group` was to run apart."""
    job_id = _id(open_job)
    if job_id in worker.with_token or job_id in worker.started:
        return True
    if worker.is_held(job_id) and job_id not in group:
        return False
    # A group starts when all other jobs have a token, and those that come later are held.
    return job_id not in group and not (group and group <= worker.started)


def _may_be_cause(open_job: OpenJob, worker: Worker) -> bool:
    """Whether a job that did not run apart may have ended `worker`; its death is counted."""
    has_token = open_job.job.job_id in worker.with_token
    return not has_token or open_job.num_deaths > 1 or has_grammar(open_job.job)


def _is_proved(open_job: OpenJob, worker: Worker) -> bool:
    """Whether a job that ran alone has ended `worker`; its death is counted."""
    return not worker.load_of_others.other_risks or open_job.num_deaths >= MAX_DEATHS


def _suspected(open_job: OpenJob, worker: Worker, group_size: int) -> OpenJob:
    """`open_job` as a suspect: alone until its first token if it had none."""
    has_token = open_job.job.job_id in worker.with_token
    group_size = group_size if has_token else 1
    return open_job.next_attempt(group_size=group_size, until_end=has_token)


def _as_before(open_job: OpenJob, *, is_suspect: bool) -> OpenJob:
    if not is_suspect:
        return open_job.next_attempt()
    return open_job.next_attempt(group_size=open_job.group_size, until_end=open_job.until_end)
