"""What one front-end process knows of the workers, and which worker runs which job.

State without sockets or threads: the link (`app/pool/link.py`) passes the monotonic time
`now`, and tests call it directly.

Every job ends exactly once: its request is completed or failed, and later results are dropped.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from app.pool.placement import (
    LeastLoaded,
    Placed,
    PrefixAffinity,
    RoutingPolicy,
    has_home,
    place_new,
    place_render,
    reason_of,
    workers_with_room,
)
from app.pool.pool_view import PoolView
from app.pool.prefix_index import as_integers
from app.pool.records import LastEnd, OpenJob, WaitingJobs, Worker, natural_order
from app.pool.request import Request
from app.pool.result_checks import defect_of
from app.pool.suspects import Suspects
from titopool.errors import (
    ERRORS_BY_CODE,
    GenerationFailed,
    ModelNotFound,
    NoReadyWorker,
    TitopoolError,
    WeightsLost,
)
from titopool.settings.sampling import scored_once
from titopool.wire.messages import Apart, Chunk, Failed, Heartbeat, Job, JobProgress, Load, Result

logger = logging.getLogger(__name__)

# More than a heartbeat takes to a front end.
LOADED_TOGETHER_S = 1.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """Jobs to send to one worker, and how many completions of each may start."""

    worker: Worker
    jobs: list[Job] = field(default_factory=list)
    granted: list[int] = field(default_factory=list)
    # As in `Generate`.
    apart: Apart = ""
    is_new: bool = False
    # As in `Grant`, for jobs that the worker has already.
    more: dict[int, tuple[int, int, int]] = field(default_factory=dict)


# Phases of a worker up to its first job, from the one before its first heartbeat.
STARTING = ("unreachable", "importing", "loading", "warming")


class Pool:
    """All workers, the jobs in flight and the waiting jobs."""

    def __init__(
        self,
        *,
        no_worker_timeout_s: float,
        policy: RoutingPolicy | None = None,
        on_lost: Callable[[str, str], None] = lambda endpoint, reason: None,
        on_placed: Callable[[Worker, OpenJob, str], None] = lambda worker, open_job, reason: None,
        are_starts_shown: bool = False,
    ):
        """
        Args:
            are_starts_shown: workers show the phases of their start on this server's screen
                themselves, so that they need no lines of every front end too.
            on_lost: called with endpoint and reason for each worker process that is lost.
            on_placed: called for each job that is about to be sent, with the reason of the choice.
        """
        self.policy = policy or PrefixAffinity()
        self._on_lost, self._on_placed = on_lost, on_placed
        self._are_starts_shown = are_starts_shown
        self.workers: dict[str, Worker] = {}
        self.waiting = WaitingJobs()
        # Waiting jobs without completions: they take no slot, so neither queue holds up the other.
        self.renders = WaitingJobs()
        # Jobs that may have ended a worker.
        self.suspects = Suspects()
        self.view = PoolView()
        self._failed: list[Request] = []
        self._no_worker_timeout_s = no_worker_timeout_s
        self._without_worker_since: float | None = None

    # ---- workers ---------------------------------------------------------------------

    def sorted_workers(self) -> list[Worker]:
        """All workers in the order of their endpoints, which is the same in all front ends."""
        return sorted(self.workers.values(), key=lambda worker: natural_order(worker.endpoint))

    def add_worker(self, endpoint: str, now: float) -> None:
        others = [worker.heartbeat for worker in self.workers.values()]
        is_late = bool(others) and all(beat and beat.facts for beat in others)
        self.workers[endpoint] = Worker(endpoint, last_seen=now, is_loading_late=is_late)

    def remove_worker(self, endpoint: str) -> None:
        """Forgets an endpoint that has left the pool."""
        self.mark_worker_lost(endpoint, "its address was removed", blames_jobs=False)
        del self.workers[endpoint]

    def on_heartbeat(self, endpoint: str, beat: Heartbeat, now: float) -> None:
        """Records a heartbeat. It can change the pool's model and the phase of every worker."""
        worker = self.workers[endpoint]
        if worker.heartbeat is not None and worker.heartbeat.incarnation != beat.incarnation:
            self.mark_worker_lost(endpoint, "it has restarted")
        worker.record_heartbeat(beat, now)
        self._choose_model()
        self.view.merge(beat, now)
        for one in self.workers.values():
            self._update_phase(one)

    def _choose_model(self) -> None:
        """Takes the model of the reachable engine that was loaded first.

        So all front ends choose the same model, and a new worker with another model changes
        nothing.
        """
        loaded = [
            (worker.loaded_at, natural_order(worker.endpoint), worker.heartbeat.facts)
            for worker in self.workers.values()
            if worker.heartbeat is not None and worker.heartbeat.facts is not None
        ]
        if not loaded:
            return
        first = min(loaded_at for loaded_at, *_ in loaded)
        # Front ends may see another order of those that were loaded at the same time.
        together = [one for one in loaded if one[0] <= first + LOADED_TOGETHER_S]
        *_, facts = min(together, key=lambda one: one[1])
        changed = self.view.adopt_model(facts)
        if changed is not None:
            self._fail_waiting(changed)

    def _update_phase(self, worker: Worker) -> None:
        beat, before = worker.heartbeat, worker.phase
        if beat is None:
            return
        worker.phase, worker.reason = self.view.phase_of(beat)
        worker.adapters = self.view.adapters_of(beat)
        if worker.phase != before:
            is_start = before in STARTING and worker.phase in (*STARTING, "ready")
            level = logging.DEBUG if is_start and self._are_starts_shown else logging.INFO
            level = logging.ERROR if worker.phase == "mismatched" else level
            is_out = worker.reason and worker.phase != "ready"
            reason = f", gets no jobs: {worker.reason}" if is_out else ""
            logger.log(
                level, "worker %s at %s: %s%s",
                beat.worker_id, worker.endpoint, worker.phase, reason,
            )  # fmt: skip

    def on_load(self, endpoint: str, load: Load) -> None:
        """Records what other front ends have in flight at a worker."""
        self.workers[endpoint].record_load_of_others(load)

    def mark_worker_lost(self, endpoint: str, reason: str, *, blames_jobs: bool = True) -> None:
        """Requeues the jobs of a worker, or fails those that no other worker may run.

        Args:
            blames_jobs: False if the worker was stopped on purpose, so that no job is the cause.
        """
        worker = self.workers[endpoint]
        if worker.heartbeat is not None:
            logger.warning(
                "worker %s at %s is lost with %d open jobs: %s",
                worker.heartbeat.worker_id, endpoint, len(worker.jobs), reason,
            )  # fmt: skip
            worker.last_end = LastEnd(worker.heartbeat.worker_id, reason, worker.last_seen)
        verdict = self.suspects.judge(worker, blames_jobs=blames_jobs)
        worker.forget_process()
        for job_id in list(worker.jobs):
            self._end(worker, job_id)
        if verdict.cause is not None:
            self.fail(verdict.cause.request, _ended_workers(verdict.cause, reason))
        requeued = []
        for open_job in verdict.others:
            error = self._why_not_requeued(open_job, reason)
            if error is None:
                requeued.append(open_job)
            else:
                self.fail(open_job.request, error)
        suspects = [one for one in requeued if one.group_size]
        if suspects:
            logger.warning(
                "%d jobs may have ended the worker at %s; they run apart from all others",
                len(suspects), endpoint,
            )  # fmt: skip
        self.suspects.add(suspects)
        # These jobs have waited longest.
        for open_job in reversed(requeued):
            if not open_job.group_size:
                self._queue_of(open_job.job).prepend([open_job])
        self._on_lost(endpoint, reason)

    def _why_not_requeued(self, open_job: OpenJob, reason: str) -> TitopoolError | None:
        """The error of a job that lost its worker; None if another worker may run the job."""
        if open_job.request.has_chunks(open_job.index):
            # Another worker would sample other tokens than those that the client has received.
            return GenerationFailed(
                f"{open_job.location}: its worker was lost during the stream ({reason}), which is not "
                "known to be this request's fault; send the request again"
            )
        return self.view.model_change_since(open_job.request.facts)

    # ---- what the pool can serve -------------------------------------------------------

    @property
    def adapters(self) -> dict[str, int]:
        """Versions of the LoRA adapters that a ready worker serves now, by name."""
        ready = [worker for worker in self.workers.values() if worker.facts]
        return {
            name: record.version
            for name, record in self.view.state.adapters.by_name.items()
            if any(name in worker.adapters for worker in ready)
        }

    @property
    def has_lost_weights(self) -> bool:
        """Whether workers are reachable, and none of them has or can load the last update."""
        # The phases in the heartbeats: a worker that only this front end takes for stale may be
        # about to get the weights.
        phases = [
            worker.heartbeat.phase
            for worker in self.workers.values()
            if worker.heartbeat is not None and worker.phase != "mismatched"
        ]
        return bool(phases) and all(one in ("waiting_for_weights", "stale") for one in phases)

    def weights_lost(self) -> WeightsLost:
        """The error of requests while `has_lost_weights`."""
        return WeightsLost(
            f"no worker has the weights of version {self.view.state.weights.version} any more, as "
            "all workers were restarted; send a complete weight update, or POST /weights/accept to "
            "continue with the model's initial weights",
            retry_after_s=5,
        )

    # ---- jobs ------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a worker."""
        num_queued = len(self.waiting) - self.waiting.num_begun
        return num_queued + len(self.renders) + len(self.suspects)

    @property
    def num_open_jobs(self) -> int:
        """Jobs in flight and waiting."""
        return self.num_waiting + sum(len(worker.jobs) for worker in self.workers.values())

    def submit(self, request: Request) -> None:
        """Queues all jobs of `request`; fails it if the model has changed since its checks."""
        error = self.view.model_change_since(request.facts)
        for index, job in enumerate(request.jobs):
            open_job = OpenJob(job, request, index, as_integers(job.prefix))
            if error is not None:
                self.fail(open_job.request, error)
            else:
                self._queue_of(job).append(open_job)

    def _queue_of(self, job: Job) -> WaitingJobs:
        return self.waiting if job.num_sequences else self.renders

    def assign(self) -> list[Assignment]:
        """Gives completions of waiting jobs to ready workers with room, as the routing policy chooses."""
        apart, ready = self._assign_suspects()
        assignments: dict[tuple[str, bool], Assignment] = {}
        others = self.workers.keys() - {worker.endpoint for worker in ready}
        while choice := (
            self._choose_begun(others) or self._choose_render(ready) or self._choose(ready)
        ):
            worker, open_job = choice
            job, queue = open_job.job, self._queue_of(open_job.job)
            has_begun, is_new, num_new = bool(open_job.endpoint), queue.is_new(open_job), 0
            num_room = worker.num_room_for(open_job, is_new=False)
            if is_new and not (num_room and worker.num_idle and not worker.slots.num_held):
                # It passes those that wait at the worker.
                num_new = worker.num_room_for(open_job, is_new=True)
            num_room = num_new or num_room
            if not has_begun:
                self._on_placed(worker, open_job, reason_of(worker, open_job, ready, self.policy))
            num_granted = worker.slots[job.job_id].granted if has_begun else 0
            num = min(num_room, job.num_sequences - num_granted)
            is_whole = num_granted + num == job.num_sequences
            queue.take(open_job, num, is_first=not has_begun, is_whole=is_whole)
            worker.grant(open_job, num, is_new=is_new)
            # The worker knows whether other front ends' completions wait there.
            key = (worker.endpoint, is_new)
            sent = assignments.setdefault(key, Assignment(worker, is_new=is_new))
            if has_begun:
                sent.more[job.job_id] = (job.job_id, job.attempt, num_granted + num)
            else:
                sent.jobs.append(job)
                sent.granted.append(num)
        # Jobs before what is granted to them later.
        return [*apart, *sorted(assignments.values(), key=lambda one: bool(one.more))]

    def _assign_suspects(self) -> tuple[list[Assignment], list[Worker]]:
        """Moves suspects to the worker that is kept for them.

        Returns:
            The assignment, if any, and the ready workers for all other jobs.
        """
        ready = [worker for worker in self.workers.values() if worker.facts is not None]
        while ready and self.suspects and not self._is_served(self.suspects.first):
            self._fail_without_adapter(self.suspects.first)
        worker = self.suspects.worker_of(self.workers.values())
        group = self.suspects.take_group(worker) if worker else []
        apart, kept = [], {one.endpoint: one.load_of_others.apart for one in ready}
        if worker is not None:
            for open_job in group:
                self._on_placed(worker, open_job, "requeued")
                worker.grant(open_job, open_job.job.num_sequences, is_new=False)
            until = kept[worker.endpoint] = self.suspects.until_of(worker) or "token"
            if group:
                jobs = [one.job for one in group]
                apart = [Assignment(worker, jobs, [one.num_sequences for one in jobs], until)]
        # Where all run suspects until their end, they serve on.
        usable = [one for one in ready if not kept[one.endpoint]]
        return apart, usable or [one for one in ready if kept[one.endpoint] == "end"]

    def _choose_begun(self, endpoints: Collection[str]) -> Placed | None:
        """A job that has begun at one of the workers that get no others.

        Out of turn: such a worker waits for the end of its jobs.
        """
        for open_job in self.waiting.begun if endpoints else ():
            worker = self.workers[open_job.endpoint]
            if open_job.endpoint in endpoints and worker.has_room_for(open_job, is_new=False):
                return Placed(worker, open_job)
        return None

    def _choose_render(self, ready: list[Worker]) -> Placed | None:
        if not self.renders:
            return None
        candidates = workers_with_room(self.renders.first, ready, is_new=False)
        return place_render(self.renders, candidates) if candidates else None

    def _choose(self, ready: list[Worker]) -> Placed | None:
        if not ready:
            return None
        while self.waiting and not self._is_served(first := self.waiting.first):
            self._fail_without_adapter(first)
        if not self.waiting:
            return None
        first, candidates = self._first_with_room(ready)
        if first.endpoint and candidates:
            # No policy has a choice.
            return Placed(candidates[0], first)
        if not candidates or self._has_room_soon(first, candidates, ready):
            for new in self.waiting.new_jobs():
                if candidates := workers_with_room(new, ready, is_new=True):
                    return place_new(new, candidates, ready)
            return None
        try:
            return self.policy.choose(first, self.waiting, candidates, ready)
        except Exception:
            # A policy only affects speed: jobs must be sent in any case.
            logger.exception("the routing policy failed; jobs now go to the least loaded worker")
            self.policy = LeastLoaded()
            return self.policy.choose(first, self.waiting, candidates, ready)

    def _first_with_room(self, ready: list[Worker]) -> tuple[OpenJob, list[Worker]]:
        """The next job and the workers that can take some of it.

        A job that has begun at a worker without room is passed over: another worker may have room for
        those behind it.
        """
        first = self.waiting.first
        candidates = workers_with_room(first, ready, is_new=self.waiting.is_new(first))
        if candidates or not first.endpoint:
            return first, candidates
        for open_job in self.waiting:
            is_new = self.waiting.is_new(open_job)
            candidates = workers_with_room(open_job, ready, is_new=is_new)
            if candidates or not open_job.endpoint:
                break
        return open_job, candidates

    def _has_room_soon(
        self, first: OpenJob, candidates: Sequence[Worker], ready: Sequence[Worker]
    ) -> bool:
        """Whether a worker with less load than all candidates, by a job, may have room after its report.

        Otherwise the worker that reports first would get all that waits of a wide request. New requests
        do not wait for that.
        """
        if len(candidates) == len(ready) or self.waiting.is_new(first):
            return False
        if first.request.session or has_home(first, candidates):
            return False
        most = min(one.known_load for one in candidates) - first.job.num_tokens
        return any(one.known_load <= most and one.may_report_room(first) for one in ready)

    def _is_served(self, open_job: OpenJob) -> bool:
        """Whether a worker has the adapter of a job; one that has begun keeps the one that it has."""
        return bool(open_job.endpoint) or any(
            one.facts and one.has_adapter_of(open_job.job) for one in self.workers.values()
        )

    def _fail_without_adapter(self, open_job: OpenJob) -> None:
        self.waiting.remove(open_job.job.job_id)
        self.suspects.remove(open_job.job.job_id)
        name = open_job.job.adapter
        if name in self.view.state.adapters.by_name:
            text = f"no ready worker has the adapter {name!r}; send the request again"
            self.fail(open_job.request, NoReadyWorker(text, retry_after_s=2))
        else:
            text = f"the adapter {name!r} has been unloaded; load it or choose another model"
            self.fail(open_job.request, ModelNotFound(text, param="model"))

    def on_results(self, endpoint: str, results: Iterable[Result]) -> None:
        """Passes results to their requests; drops results of an earlier attempt."""
        worker = self.workers[endpoint]
        for result in results:
            open_job = worker.jobs.get(result.job_id)
            if open_job is not None and open_job.job.attempt == result.attempt:
                self._on_result(worker, open_job, result)

    def _on_result(self, worker: Worker, open_job: OpenJob, result: Result) -> None:
        if isinstance(result, JobProgress):
            worker.record_progress(result)
            if result.has_token:
                open_job.request.note_first_token()
        elif isinstance(result, Failed):
            error_type = ERRORS_BY_CODE.get(result.code, GenerationFailed)
            self._end(worker, result.job_id)
            self.fail(
                open_job.request,
                error_type(f"{open_job.location}: {result.message}", param=result.param),
            )
        elif defect := defect_of(open_job.job, result):
            error = GenerationFailed(
                f"{open_job.location}: the worker sent an invalid result: {defect}"
            )
            # The worker may still run the job: `withdraw` removes it, and the link aborts it.
            self.fail(open_job.request, error)
        elif isinstance(result, Chunk):
            if result.job_id not in worker.with_token:
                worker.record_progress(JobProgress(result.job_id, result.attempt, has_token=True))
            if refusal := open_job.request.add_chunk(open_job.index, result):
                self.fail(open_job.request, refusal)
        else:
            self._end(worker, result.job_id)
            if result.prefix:
                worker.prefixes.record([*open_job.digests, *as_integers(result.prefix)])
            if refusal := open_job.request.complete(open_job.index, result):
                self.fail(open_job.request, refusal)

    def _end(self, worker: Worker, job_id: int) -> OpenJob:
        """Takes a job that has ended, or is to run elsewhere, from its worker and from the queue."""
        open_job = worker.remove(job_id)
        self._queue_of(open_job.job).remove(job_id)
        return open_job

    def fail(self, request: Request, error: TitopoolError) -> None:
        """Fails the request; its remaining jobs stay open until `withdraw`."""
        if request.fail(error):
            self._failed.append(request)

    def take_failed(self) -> list[Request]:
        """Requests that failed since the last call; some of their jobs may still run."""
        failed, self._failed = self._failed, []
        return failed

    def withdraw(self, request: Request) -> list[tuple[Worker, list[tuple[int, int]]]]:
        """Removes the open jobs of a failed or cancelled request.

        Returns:
            The jobs to abort, as (job id, attempt) pairs for each worker.
        """
        aborts, own = [], {job.job_id for job in request.jobs}
        for worker in self.workers.values():
            # As fast as the smaller of both: a pool may have many workers, and a request many jobs.
            if job_ids := sorted(worker.jobs.keys() & own):
                keys = [(job_id, self._end(worker, job_id).job.attempt) for job_id in job_ids]
                aborts.append((worker, keys))
        for job in request.jobs:
            self._queue_of(job).remove(job.job_id)
            self.suspects.remove(job.job_id)
        return aborts

    def end_waiting(
        self, client_ids: Collection[str] | None, only: Request | None = None
    ) -> tuple[int, list[tuple[Worker, list[tuple[int, int]]]]]:
        """Ends waiting jobs as aborted before their first token, also those that wait at a worker.

        A job whose prompt is scored goes on, as it would at a worker; so does a render.

        Args:
            client_ids: the clients' ids of the requests; None: all.
            only: others of the same id go on; None: they do not.

        Returns:
            How many there were, and those to abort at workers, as from `withdraw`.
        """

        is_scored = scored_once()

        def is_meant(one: OpenJob) -> bool:
            if client_ids is not None and not one.job.is_named_in(client_ids):
                return False
            if only is not None and one.request is not only:
                return False
            return not is_scored(one.job)

        waiting = [one for one in self.waiting if not one.endpoint]
        ended, aborts = [one for one in (*waiting, *self.suspects) if is_meant(one)], []
        for one in ended:
            self.waiting.remove(one.job.job_id)
            self.suspects.remove(one.job.job_id)
        for worker in self.workers.values():
            held = [
                job_id
                for job_id, one in worker.jobs.items()
                if worker.is_held(job_id) and is_meant(one)
            ]
            removed = [self._end(worker, job_id) for job_id in held]
            ended += removed
            if removed:
                aborts.append((worker, [(one.job.job_id, one.job.attempt) for one in removed]))
        version, adapters = self.view.state.weights.version, self.adapters
        for one in ended:
            if refusal := one.end_as_aborted(version, adapters.get(one.job.adapter)):
                self.fail(one.request, refusal)
        return len(ended), aborts

    def where_is(self, request: Request) -> tuple[list[str], bool]:
        """Names of the workers that have jobs of `request`, and whether one has begun.

        A job that was granted slots before they were free waits at its worker.
        """
        job_ids, names, has_begun = {job.job_id for job in request.jobs}, [], False
        for worker in self.sorted_workers():
            if found := worker.jobs.keys() & job_ids:
                names.append(worker.name)
                has_begun |= not all(worker.is_held(job_id) for job_id in found)
        return names, has_begun

    def open_requests(self) -> list[Request]:
        """The request of every job in flight or waiting; a request may occur several times."""
        in_flight = [job for worker in self.workers.values() for job in worker.jobs.values()]
        return [job.request for job in (*in_flight, *self.waiting, *self.renders, *self.suspects)]

    # ---- time ------------------------------------------------------------------------

    def restart_silence_timers(self, now: float) -> None:
        """Counts the silence of all workers from `now` on."""
        for worker in self.workers.values():
            worker.last_seen = now

    def silent_workers(self, now: float, timeout_s: float) -> list[Worker]:
        """Workers whose last heartbeat is more than `timeout_s` old."""
        return [
            worker
            for worker in self.workers.values()
            if worker.heartbeat is not None and now - worker.last_seen > timeout_s
        ]

    def fail_waiting_without_worker(self, now: float) -> None:
        """Fails waiting jobs once no worker was ready for `no_worker_timeout_s`.

        They fail at once if no worker can become ready without a weight update.
        """
        if any(worker.facts is not None for worker in self.workers.values()):
            self._without_worker_since = None
            return
        if self._without_worker_since is None:
            self._without_worker_since = now
        if self.has_lost_weights:
            self._fail_waiting(self.weights_lost())
        elif now - self._without_worker_since >= self._no_worker_timeout_s:
            self._fail_waiting(
                NoReadyWorker(
                    f"no worker has been ready for {self._no_worker_timeout_s:g} s "
                    "(worker_start_timeout_s); ask /ready for the reasons"
                )
            )

    def _fail_waiting(self, error: TitopoolError) -> None:
        queues = (self.renders, self.waiting, self.suspects)
        for open_job in (one for queue in queues for one in queue.remove_all()):
            self.fail(open_job.request, error)


def _ended_workers(open_job: OpenJob, reason: str) -> GenerationFailed:
    """The error of a job that is known to have ended workers."""
    return GenerationFailed(
        f"{open_job.location}: {open_job.num_deaths} workers died while they ran this prompt, and at "
        f"the last one it ran apart from all others ({reason}); the prompt is not retried, and "
        "sending it again ends another worker"
    )
