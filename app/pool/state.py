"""What one front-end process knows of the workers, and which job goes where.

Pure state: no sockets, no threads, no clock of its own; only the link touches it
(`app/pool/link.py`), tests drive it by hand. What the pool itself knows (model, weights, pauses,
adapters, load by others) comes from the workers' heartbeats.

A job has exactly one end: its request is told once, whatever comes later.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec

from app.pool.pending import Request
from app.pool.placement import ByPrefix, LeastLoaded, Policy
from app.pool.prefix_index import as_integers
from app.pool.queue import WaitingJobs
from app.pool.records import OpenJob, Worker
from app.pool.result_checks import misfit
from titopool.errors import (
    ERRORS_BY_CODE,
    GenerationFailed,
    ModelChanged,
    ModelNotFound,
    NoReadyWorker,
    TitopoolError,
    WeightsLost,
)
from titopool.wire.messages import (
    NO_LOAD,
    Chunk,
    Completed,
    Failed,
    Heartbeat,
    Job,
    Load,
    WorkerFacts,
)
from titopool.wire.pool_state import PoolState

logger = logging.getLogger(__name__)

# A job is sent to a second worker when the first dies, and to no third.
MAX_DEATHS = 2
# Of the workers' engines, which must be alike.
COMPARED_FACTS = (
    "model", "vocab_size", "max_model_len", "max_logprobs", "world_size", "tool_call_parser",
    "reasoning_parser", "tokenizer_digest",
)  # fmt: skip


class Assignment(NamedTuple):
    """Jobs to send to one worker."""

    worker: Worker
    jobs: list[Job]


class Pool:
    """All workers, the jobs in flight and those that wait."""

    def __init__(
        self,
        *,
        no_worker_timeout_s: float,
        policy: Policy | None = None,
        on_lost: Callable[[str, str], None] = lambda endpoint, reason: None,
    ):
        """`on_lost` gets the endpoint of each process that is gone, and why."""
        self._policy = policy or ByPrefix()
        self._on_lost = on_lost
        self.workers: dict[str, Worker] = {}
        self.waiting = WaitingJobs()
        self.num_open_jobs = 0
        self._failed: list[Request] = []
        self._no_worker_timeout_s = no_worker_timeout_s
        self._without_worker_since: float | None = None
        # Of the model that the pool serves; stay known while its workers restart.
        self.facts: WorkerFacts | None = None
        # What is known of the pool, and when its pause ends.
        self._state = PoolState()
        self._lease_end = 0.0

    # ---- workers ---------------------------------------------------------------------

    def in_order(self) -> list[Worker]:
        """All workers in the order that every front end has: that of their endpoints."""
        return sorted(self.workers.values(), key=lambda one: natural_order(one.endpoint))

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
            known = None
        worker.heartbeat, worker.last_seen = beat, now
        worker.hear(Load(beat.other_sequences, beat.other_tokens))
        if known is not None and known.weights.order != beat.weights.order:
            # What was cached was computed with other weights.
            worker.prefixes.clear()
        elif beat.prefixes:
            worker.prefixes.record(as_integers(beat.prefixes))
        if beat.facts is not None:
            worker.prefixes.resize(beat.facts.num_cache_tokens)
        self._choose_model()
        if beat.facts is not None and beat.facts.model == self._state.model:
            self._learn(beat.pool, now)
        for one in self.workers.values():
            self._judge(one)

    def _choose_model(self) -> None:
        """The pool's model is that of the engine that was loaded first, of those that are there:
        all front ends come to the same, and a newcomer with another model changes nothing."""
        loaded = [one for one in self.workers.values() if one.heartbeat and one.heartbeat.facts]
        if not loaded:
            return
        oldest = min(loaded, key=_age_order)
        assert oldest.heartbeat is not None
        facts = oldest.heartbeat.facts
        assert facts is not None
        before, self.facts = self.facts, facts
        if before is not None and difference(before, facts):
            logger.warning("the pool serves another model: %s", difference(before, facts))
            self._state = PoolState()
            for open_job in list(self.waiting):
                self.waiting.take(open_job.job.job_id)
                self._fail(open_job, model_changed(before, facts))
        if self._state.model != facts.model:
            self._state = PoolState(model=facts.model)

    def _judge(self, worker: Worker) -> None:
        """Sets the worker's phase: its own, unless the pool knows better."""
        beat, before = worker.heartbeat, worker.phase
        if beat is None:
            return
        worker.phase, worker.reason = beat.phase, ""
        if beat.facts is not None and self.facts is not None:
            wanted = self._state.weights
            if odd := difference(self.facts, beat.facts):
                worker.phase, worker.reason = "mismatched", odd
            elif beat.phase == "ready" and not beat.weights.serves_as(wanted):
                # It will hear of it with the next Hello.
                worker.phase = "stale"
        worker.adapters = {
            name
            for name, record in self._state.adapters.by_name.items()
            if beat.adapters.get(name) == record.version
        }
        if worker.phase != before:
            level = logging.ERROR if worker.phase == "mismatched" else logging.INFO
            reason = f", gets no jobs: {worker.reason}" if worker.reason else ""
            logger.log(
                level,
                "worker %s at %s: %s%s",
                beat.worker_id,
                worker.endpoint,
                worker.phase,
                reason,
            )

    def on_load(self, endpoint: str, load: Load) -> None:
        self.workers[endpoint].hear(load)

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
        worker.heartbeat, worker.phase, worker.reason = None, "unreachable", ""
        worker.hear(NO_LOAD)
        worker.prefixes.clear()
        again = [
            self._again(worker.remove(job_id), reason, has_died) for job_id in list(worker.jobs)
        ]
        # They have waited longest.
        self.waiting.put_first([one for one in again if one is not None])
        self._on_lost(endpoint, reason)

    def _again(self, open_job: OpenJob, reason: str, has_died: bool) -> OpenJob | None:
        """The job for another worker; None: it has failed."""
        num_deaths = open_job.num_deaths + has_died
        if num_deaths >= MAX_DEATHS:
            self._fail(
                open_job,
                GenerationFailed(
                    f"{open_job.request.place_of(open_job.index)}: {num_deaths} workers died while they ran it "
                    f"(the last: {reason}); it is not tried again"
                ),
            )
            return None
        if open_job.request.has_chunks(open_job.index):
            # It would sample other tokens than those that the client has.
            self._fail(
                open_job,
                GenerationFailed(
                    f"{open_job.request.place_of(open_job.index)}: its worker was lost during the "
                    f"stream ({reason}); send the request again"
                ),
            )
            return None
        checked_for = open_job.request.facts
        if checked_for and self.facts and difference(checked_for, self.facts):
            # While it ran, another worker's model became the pool's.
            self._fail(open_job, model_changed(checked_for, self.facts))
            return None
        again = msgspec.structs.replace(open_job.job, attempt=open_job.job.attempt + 1)
        return dataclasses.replace(open_job, job=again, num_deaths=num_deaths)

    # ---- what the pool shares ----------------------------------------------------------

    def state(self, now: float) -> PoolState:
        """What is known of the pool, as a message tells it."""
        pause = self._state.pause
        left_s = max(0.0, self._lease_end - now)
        pause = msgspec.structs.replace(
            pause, mode=pause.mode if left_s else None, lease_left_s=left_s
        )
        return msgspec.structs.replace(self._state, pause=pause)

    def _learn(self, told: PoolState, now: float) -> None:
        before, self._state = self._state, self._state.merged(told)
        if self._state.pause is not before.pause:
            self._lease_end = now + self._state.pause.lease_left_s

    @property
    def weights_clock(self) -> int:
        """Logical clock of the pool's weights."""
        return self._state.weights.clock

    @property
    def pause_clock(self) -> int:
        """Logical clock of the pool's pause."""
        return self._state.pause.clock

    @property
    def adapters_clock(self) -> int:
        """Logical clock of the pool's adapters."""
        return self._state.adapters.clock

    @property
    def adapters(self) -> dict[str, int]:
        """LoRA adapters by name, and their versions, that a worker can run now."""
        ready = [one for one in self.workers.values() if one.facts]
        return {
            name: record.version
            for name, record in self._state.adapters.by_name.items()
            if any(name in one.adapters for one in ready)
        }

    @property
    def has_lost_weights(self) -> bool:
        """Whether workers are there, and none has or can get the weights of the last update."""
        there = [
            one.heartbeat.phase
            for one in self.workers.values()
            if one.heartbeat is not None and one.phase != "mismatched"
        ]
        # As they say themselves: what a worker has not heard of yet it may be about to get.
        return bool(there) and all(one in ("waiting_for_weights", "stale") for one in there)

    # ---- jobs ------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Lets all jobs of `request` wait for a worker."""
        self.num_open_jobs += len(request.jobs)
        open_jobs = [
            OpenJob(job, request, index, as_integers(job.prefix))
            for index, job in enumerate(request.jobs)
        ]
        checked_for = request.facts
        if checked_for and self.facts and difference(checked_for, self.facts):
            for open_job in open_jobs:
                self._fail(open_job, model_changed(checked_for, self.facts))
            return
        for open_job in open_jobs:
            self.waiting.put_last(open_job)

    def assign(self) -> list[Assignment]:
        """Takes waiting jobs to ready workers that have room, as the policy says."""
        ready = [worker for worker in self.workers.values() if worker.facts is not None]
        chosen: dict[str, Assignment] = {}
        while self.waiting and ready:
            if not any(worker.has_adapter_of(self.waiting.first.job) for worker in ready):
                self._fail_without_adapter(self.waiting.first)
                continue
            choice = self._choose(ready)
            if choice is None:
                break
            worker, open_job = choice
            self.waiting.take(open_job.job.job_id)
            worker.add(open_job)
            assignment = chosen.setdefault(worker.endpoint, Assignment(worker, []))
            assignment.jobs.append(open_job.job)
        return list(chosen.values())

    def _choose(self, ready: list[Worker]) -> tuple[Worker, OpenJob] | None:
        try:
            return self._policy.choose(self.waiting, ready)
        except Exception:
            # A policy is a matter of speed: jobs go out in any case.
            logger.exception("the policy of placement failed; the least loaded worker is taken")
            self._policy = LeastLoaded()
            return self._policy.choose(self.waiting, ready)

    def _fail_without_adapter(self, open_job: OpenJob) -> None:
        self.waiting.take(open_job.job.job_id)
        name = open_job.job.adapter
        if name in self._state.adapters.by_name:
            text = f"no worker has the adapter {name!r} now; send the request again"
            self._fail(open_job, NoReadyWorker(text, retry_after_s=2))
        else:
            text = f"the adapter {name!r} is not loaded any more"
            self._fail(open_job, ModelNotFound(text, param="model"))

    def on_results(self, endpoint: str, results: Iterable[Completed | Failed | Chunk]) -> None:
        """Hands results to their requests; drops those of an attempt that was lost."""
        worker = self.workers[endpoint]
        for result in results:
            open_job = worker.jobs.get(result.job_id)
            if open_job is None or open_job.job.attempt != result.attempt:
                continue
            if not isinstance(result, Failed) and (odd := misfit(open_job.job, result)):
                text = f"the worker gave no answer to it: {odd}"
                if isinstance(result, Chunk):
                    # The worker goes on with the job until it is told to stop.
                    self._end(open_job, GenerationFailed(text))
                    continue
                result = Failed(result.job_id, result.attempt, GenerationFailed.code, text)
            if isinstance(result, Chunk):
                open_job.request.add_chunk(open_job.index, result)
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
        """The job is in no queue and at no worker any more."""
        self.num_open_jobs -= 1
        self._end(open_job, error)

    def _end(self, open_job: OpenJob, error: TitopoolError) -> None:
        """Fails the request; `drop_done` takes back those of its jobs that are open."""
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
        for worker in self.workers.values():
            mine = [job.job_id for job in request.jobs if job.job_id in worker.jobs]
            if mine:
                keys = [(job_id, worker.remove(job_id).job.attempt) for job_id in mine]
                self.num_open_jobs -= len(keys)
                aborts.append((worker, keys))
        for job in request.jobs:
            if self.waiting.take(job.job_id) is not None:
                self.num_open_jobs -= 1
        return aborts

    def open_requests(self) -> list[Request]:
        """Every request with a job in flight or waiting."""
        in_flight = [job for worker in self.workers.values() for job in worker.jobs.values()]
        return [job.request for job in (*in_flight, *self.waiting)]

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
        """Fails what waits when no worker has been ready for too long, or none can be."""
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
                    "(worker_start_timeout_s)"
                )
            )

    def _fail_waiting(self, error: TitopoolError) -> None:
        for open_job in list(self.waiting):
            self.waiting.take(open_job.job.job_id)
            self._fail(open_job, error)

    def weights_lost(self) -> WeightsLost:
        """What requests get while `has_lost_weights`."""
        return WeightsLost(
            f"no worker has the weights of version {self._state.weights.version} any more, as all "
            "were started again; send a complete weight update, or POST /weights/accept to go on "
            "with the model's own weights",
            retry_after_s=5,
        )


def difference(wanted: WorkerFacts, facts: WorkerFacts) -> str:
    """What tells `facts` from those of the pool; "" if nothing does."""
    for name in COMPARED_FACTS:
        mine, theirs = getattr(facts, name), getattr(wanted, name)
        if mine != theirs:
            return f"its {name} is {mine}, that of the pool is {theirs}"
    return ""


def model_changed(before: WorkerFacts, now: WorkerFacts) -> ModelChanged:
    """What a request gets that was checked for the model before."""
    return ModelChanged(
        f"the workers serve {now.model!r} now, and the request was checked for {before.model!r} as "
        f"it was ({difference(before, now)}); send it again if that is meant",
        retry_after_s=1,
    )


@lru_cache(maxsize=1024)
def natural_order(endpoint: str) -> list[int | str]:
    """A key that puts worker-2 before worker-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", endpoint)]


def _age_order(worker: Worker) -> tuple[object, ...]:
    assert worker.heartbeat is not None
    return worker.heartbeat.loaded_at, natural_order(worker.endpoint)
