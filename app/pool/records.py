"""What the pool keeps of each worker, and of each job until the job ends."""

import bisect
import dataclasses
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
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
    EngineMetrics,
    Heartbeat,
    Job,
    JobProgress,
    Load,
    WorkerFacts,
)

# The share of an engine's slots that is kept for requests of which no job was sent, at least one
# slot. An engine with fewer slots than the second number keeps none.
KEPT_SHARE, LEAST_SLOTS = 0.02, 8
# How many jobs a key may be ahead of other keys by requests that take kept slots.
MAX_LEAD = 8
# Jobs of at most so many engine steps are sent ahead of free slots: as many as end within two steps,
# and at most a quarter of the slots. They wait at the worker, so that the engine does not wait for a
# message to the front end and back.
SHORT_STEPS, STEPS_AHEAD, MAX_AHEAD = 32, 2, 0.25
# Renders (jobs without completions) of all front ends at a worker. Their files wait in the front
# ends, and a thread for images (8 by default at most) never waits for the next one.
MAX_RENDERS = 32


@dataclass(frozen=True, slots=True)
class LastEnd:
    """A process that was lost: its worker's name, why, and the monotonic time of its last heartbeat."""

    worker_id: str
    reason: str
    last_seen: float


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
    # Ids of `jobs`: those that are known to have a token, those that were held and have started, and
    # those that were sent ahead and have not.
    with_token: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)
    num_sequences: int = 0
    # Of `ahead`.
    num_sequences_ahead: int = 0
    num_tokens: int = 0
    # Of `jobs`, those without completions.
    num_renders: int = 0
    # What other front ends have in flight here, as last reported.
    load_of_others: Load = NO_LOAD
    # Tokens of the jobs that this front end has sent since that report.
    num_tokens_since_report: int = 0
    # `num_sequences` at the time of that report.
    num_sequences_at_report: int = 0
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    # The engine's own, as last sent; None: none came since a client asked for /metrics.
    engine_metrics: EngineMetrics | None = None
    # Whether it joined a pool whose workers all had loaded, and has not loaded itself.
    is_loading_late: bool = False
    # Names of the LoRA adapters that the worker has in the pool's version.
    adapters: set[str] = field(default_factory=set)
    # Of the last process that answered here and was lost; None: there was none.
    last_end: "LastEnd | None" = None

    @property
    def name(self) -> str:
        """The worker's own name; while no process answers, its endpoint."""
        return self.heartbeat.worker_id if self.heartbeat else self.endpoint

    @property
    def facts(self) -> WorkerFacts | None:
        """The engine's facts while the worker takes jobs, else None."""
        beat = self.heartbeat
        return beat.facts if beat is not None and self.phase == "ready" else None

    @property
    def is_joining(self) -> bool:
        """Whether updates do not wait for it: it gets the pool's weights before it serves."""
        is_fetching = self.heartbeat is not None and self.heartbeat.phase == "fetching_weights"
        return self.is_loading_late or is_fetching

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

    def has_adapter_of(self, job: Job) -> bool:
        """Whether the worker serves the LoRA adapter of `job`, if `job` has one."""
        return not job.adapter or job.adapter in self.adapters

    def has_room_for(self, job: Job, *, is_new: bool) -> bool:
        """Whether the engine can start `job` now, or soon if it is short.

        A render takes no slot, and counts against this front end's share of `MAX_RENDERS`.

        Args:
            is_new: whether no job of the request was sent.
        """
        facts, beat = self.facts, self.heartbeat
        if facts is None or beat is None or not self.has_adapter_of(job):
            return False
        if not job.num_sequences:
            return self.num_renders < max(1, MAX_RENDERS // max(1, beat.num_front_ends))
        num_slots = facts.max_num_seqs
        if not is_new:
            num_slots += num_ahead(job, num_slots) - num_kept(num_slots)
        return self._fits(job, num_slots, is_new=is_new)

    def num_places_before(self, job: Job, *, is_new: bool) -> int:
        """`Generate.num_places` of a job for which there is room: not 0 if it is sent ahead."""
        if is_new or not job.num_sequences or self.facts is None:
            return 0
        num_places = self.facts.max_num_seqs - num_kept(self.facts.max_num_seqs)
        return 0 if self._fits(job, num_places, is_new=False) else num_places

    def _fits(self, job: Job, num_slots: int, *, is_new: bool) -> bool:
        """Whether `job` may have one of `num_slots` slots, or one of those ahead of them.

        A front end may use all slots that other front ends leave free. Below its fair share it may
        have one job more at the worker than slots are free: the others send no more until it has
        its share. New requests of a front end may have its fair share in any case, and pass jobs
        that were sent ahead. A job with more completions than that is sent when this front end has
        no other job here.
        """
        num_front_ends = max(1, self.heartbeat.num_front_ends if self.heartbeat else 1)
        # As in `load`: the others are assumed to have sent as much as this front end.
        num_sent = max(0, self.num_sequences - self.num_sequences_at_report)
        num_others = self.load_of_others.other_sequences + (num_front_ends - 1) * num_sent
        num_own = self.num_sequences - (self.num_sequences_ahead if is_new else 0)
        wanted, fair_share = num_own + job.num_sequences, num_slots / num_front_ends
        if num_own == 0 or wanted + num_others <= num_slots:
            return True
        is_full = num_own + num_others > num_slots
        return wanted <= fair_share and (is_new or not is_full)

    def add(self, open_job: "OpenJob", *, is_ahead: bool = False) -> None:
        """Counts a job that is sent to this worker; `is_ahead`: ahead of free slots."""
        self.jobs[open_job.job.job_id] = open_job
        open_job.request.note_placed(self.name)
        if is_ahead:
            self.ahead.add(open_job.job.job_id)
            self.num_sequences_ahead += open_job.job.num_sequences
        self.num_sequences += open_job.job.num_sequences
        self.num_tokens += open_job.job.num_tokens
        self.num_renders += not open_job.job.num_sequences
        self.num_tokens_since_report += open_job.job.num_tokens
        self.prefixes.record(open_job.digests)

    def remove(self, job_id: int) -> "OpenJob":
        """Removes a job that has ended here."""
        self._note_start(job_id)
        open_job = self.jobs.pop(job_id)
        self.with_token.discard(job_id)
        self.started.discard(job_id)
        self.num_sequences -= open_job.job.num_sequences
        self.num_tokens -= open_job.job.num_tokens
        self.num_renders -= not open_job.job.num_sequences
        return open_job

    def record_progress(self, progress: JobProgress) -> None:
        """Records that one of `jobs` has started, or has its first token."""
        self._note_start(progress.job_id)
        (self.with_token if progress.has_token else self.started).add(progress.job_id)

    def _note_start(self, job_id: int) -> None:
        if job_id in self.ahead:
            self.ahead.remove(job_id)
            self.num_sequences_ahead -= self.jobs[job_id].job.num_sequences

    def record_load_of_others(self, load: Load) -> None:
        self.load_of_others, self.num_tokens_since_report = load, 0
        self.num_sequences_at_report = self.num_sequences
        self.prefixes.record(as_integers(load.prefixes))

    def record_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Records a heartbeat of the present process, or the first one of a new process."""
        last = self.heartbeat
        self.heartbeat, self.last_seen = beat, now
        self.is_loading_late &= beat.facts is None
        self.record_load_of_others(
            Load(beat.other_sequences, beat.other_tokens, beat.other_risks, beat.apart)
        )
        if last is not None and last.weights.order != beat.weights.order:
            # The cached blocks were computed with other weights.
            self.prefixes.clear()
        if beat.facts is not None:
            self.prefixes.resize(beat.facts.num_cache_tokens)

    def forget_process(self) -> None:
        """Forgets what is only true of a process that is lost; its jobs stay."""
        self.heartbeat, self.phase, self.reason = None, "unreachable", ""
        self.engine_metrics = None
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
    # How many workers died while they ran this job, and it may have been the cause.
    num_deaths: int = 0
    # Of a suspect (`app/pool/suspects.py`): how many may run apart together, and whether until
    # their end or their first token. 0: not a suspect.
    group_size: int = 0
    until_end: bool = False

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

    def with_death(self) -> "OpenJob":
        return dataclasses.replace(self, num_deaths=self.num_deaths + 1)

    def next_attempt(self, *, group_size: int = 0, until_end: bool = False) -> "OpenJob":
        """The same job with a new attempt number: results of earlier attempts are dropped."""
        job = msgspec.structs.replace(self.job, attempt=self.job.attempt + 1)
        return dataclasses.replace(self, job=job, group_size=group_size, until_end=until_end)


@dataclass(eq=False)
class Lane:
    """The waiting jobs of one request."""

    jobs: OrderedDict[int, OpenJob]
    # Order of the request's arrival or of its last turn, whichever was later.
    since: int
    # Of its jobs that were sent, plus what the request with the fewest had at the first of them.
    num_tokens: int = 0


class KeyJobs:
    """The waiting jobs of one key: its requests have turns.

    Next is the request that had the fewest tokens, unless one without a turn has waited longer. So
    a new request waits for at most one job of each other one, and no request waits for ever. Each
    operation takes as long however many jobs wait.
    """

    def __init__(self) -> None:
        # The tokens that it had, for a weight of 1, counted from where keys that come begin; and
        # the order of its arrival or of its last turn, whichever was later.
        self.num_tokens = 0.0
        self.since = 0
        # Requests without a turn, first to last.
        self.new: OrderedDict[Request, Lane] = OrderedDict()
        self._served: dict[Request, Lane] = {}
        # (num_tokens, since, lane) of `_served`, sorted.
        self._order: list[tuple[int, int, Lane]] = []
        self._turns = itertools.count()

    def __bool__(self) -> bool:
        return bool(self.new or self._served)

    def __iter__(self) -> Iterator[OpenJob]:
        """The first jobs of all requests in the order of their turns, then the second ones, …"""
        served = (lane for *_, lane in self._order)
        first = [next(served)] if self._is_served_next() else []
        lanes = itertools.chain(first, self.new.values(), served)
        return in_turn(iter(lane.jobs.values()) for lane in lanes)

    def _is_served_next(self) -> bool:
        if not self._order or not self.new:
            return bool(self._order)
        return self._order[0][1] < next(iter(self.new.values())).since

    @property
    def first(self) -> OpenJob:
        """The next job; there must be one."""
        lane = self._order[0][2] if self._is_served_next() else next(iter(self.new.values()))
        return next(iter(lane.jobs.values()))

    @property
    def first_new(self) -> OpenJob | None:
        """The first job of the first request of which no job was sent; None if there is none."""
        lane = next(iter(self.new.values()), None)
        return next(iter(lane.jobs.values())) if lane else None

    def append(self, open_job: OpenJob) -> None:
        request = open_job.request
        lane = self.new.get(request) or self._served.get(request)
        if lane is None:
            lane = self.new[request] = Lane(OrderedDict(), next(self._turns))
        lane.jobs[open_job.job.job_id] = open_job

    def take(self, open_job: OpenJob) -> None:
        """Removes a job that is sent, which was its request's turn."""
        request = open_job.request
        was_new = request in self.new
        least = self._order[0][0] if self._order else 0
        lane = self._drop(request)
        del lane.jobs[open_job.job.job_id]
        if lane.jobs:
            lane.num_tokens = (least if was_new else lane.num_tokens) + open_job.job.num_tokens
            lane.since = next(self._turns)
            self._served[request] = lane
            bisect.insort(self._order, (lane.num_tokens, lane.since, lane))

    def remove(self, request: Request, job_id: int) -> OpenJob:
        lane = self.new.get(request) or self._served[request]
        open_job = lane.jobs.pop(job_id)
        if not lane.jobs:
            self._drop(request)
        return open_job

    def _drop(self, request: Request) -> Lane:
        """Takes a request's lane out of the order."""
        if request in self.new:
            return self.new.pop(request)
        lane = self._served.pop(request)
        del self._order[bisect.bisect_left(self._order, (lane.num_tokens, lane.since))]
        return lane


class WaitingJobs:
    """The queue of jobs that wait for a worker: keys have turns, and a key's requests share them.

    Next is the key that had the fewest tokens for its weight. A key without waiting jobs saves
    nothing up: when one comes, it begins where the first key is. Requests without a key share the
    turns of one key.
    """

    def __init__(self) -> None:
        # Jobs of lost workers had their turns: they come first.
        self._returned: OrderedDict[int, OpenJob] = OrderedDict()
        # By name, all that were ever seen: they are those of the server's file.
        self._keys: dict[str, KeyJobs] = {}
        # (num_tokens, since, key) of those that have waiting jobs, sorted.
        self._order: list[tuple[float, int, KeyJobs]] = []
        # The tokens of the first key at the last turn.
        self._least = 0.0
        self._requests: dict[int, Request] = {}
        self._turns = itertools.count()

    def __len__(self) -> int:
        return len(self._requests) + len(self._returned)

    def __iter__(self) -> Iterator[OpenJob]:
        """The first jobs of all keys in the order of their turns, then the second ones, …"""
        yield from self._returned.values()
        yield from in_turn(iter(key) for *_, key in self._order)

    @property
    def first(self) -> OpenJob:
        """The next job; there must be one. Without the generators of an iteration, as it is often used."""
        if self._returned:
            return next(iter(self._returned.values()))
        return self._order[0][2].first

    @property
    def first_new(self) -> OpenJob | None:
        """The first job of a new request that may have a kept slot; None if there is none.

        A key that is `MAX_LEAD` such jobs ahead of the first has to wait for its turn: many small
        requests would else take all slots from a key with large ones.
        """
        for num_tokens, _, key in self._order:
            new = key.first_new
            if new and num_tokens - self._order[0][0] <= MAX_LEAD * tokens_by_weight(new):
                return new
        return None

    def is_new(self, open_job: OpenJob) -> bool:
        """Whether no job of the request was sent."""
        key = self._keys.get(open_job.job.key_name)
        return key is not None and open_job.request in key.new

    def append(self, open_job: OpenJob) -> None:
        name = open_job.job.key_name
        if name not in self._keys:
            self._keys[name] = KeyJobs()
        if not (key := self._keys[name]):
            key.num_tokens = max(key.num_tokens, self._least)
            self._enter(key)
        key.append(open_job)
        self._requests[open_job.job.job_id] = open_job.request

    def prepend(self, open_jobs: Sequence[OpenJob]) -> None:
        """Puts jobs before all others, in their order."""
        for open_job in reversed(open_jobs):
            self._returned[open_job.job.job_id] = open_job
            self._returned.move_to_end(open_job.job.job_id, last=False)

    def take(self, open_job: OpenJob) -> None:
        """Removes a job that is sent, which was its key's and its request's turn."""
        if self._requests.pop(open_job.job.job_id, None) is None:
            self._returned.pop(open_job.job.job_id)
            return
        self._least = self._order[0][0]
        key = self._keys[open_job.job.key_name]
        self._leave(key)
        key.take(open_job)
        key.num_tokens += tokens_by_weight(open_job)
        if key:
            self._enter(key)

    def remove(self, job_id: int) -> OpenJob | None:
        """Removes a job and returns it; None if it does not wait."""
        request = self._requests.pop(job_id, None)
        if request is None:
            return self._returned.pop(job_id, None)
        key = self._keys[request.jobs[0].key_name]
        open_job = key.remove(request, job_id)
        if not key:
            self._leave(key)
        return open_job

    def _enter(self, key: KeyJobs) -> None:
        key.since = next(self._turns)
        bisect.insort(self._order, (key.num_tokens, key.since, key))

    def _leave(self, key: KeyJobs) -> None:
        del self._order[bisect.bisect_left(self._order, (key.num_tokens, key.since))]

    def remove_all(self) -> list[OpenJob]:
        """Empties the queue and returns its jobs in order."""
        removed = list(self)
        self.__init__()  # type: ignore[misc]
        return removed


def in_turn(queues: Iterable[Iterator[OpenJob]]) -> Iterator[OpenJob]:
    """The first of each queue, then the second ones, …"""
    begun = []
    for queue in queues:
        begun.append(queue)
        yield from itertools.islice(queue, 1)
    while begun:
        for queue in list(begun):
            if (open_job := next(queue, None)) is None:
                begun.remove(queue)
            else:
                yield open_job


def tokens_by_weight(open_job: OpenJob) -> float:
    """What a job counts for its key."""
    return open_job.job.num_tokens / open_job.request.weight


def num_kept(num_slots: int) -> int:
    """How many of an engine's slots are kept for new requests."""
    return max(1, int(KEPT_SHARE * num_slots)) if num_slots >= LEAST_SLOTS else 0


def num_ahead(job: Job, num_slots: int) -> int:
    """How many sequences like those of `job` are sent ahead of free slots."""
    num_steps = (job.num_tokens - len(job.prompt_token_ids) // 4) // job.num_sequences
    if not 0 < num_steps <= SHORT_STEPS:
        return 0
    return int(num_slots * min(MAX_AHEAD, STEPS_AHEAD / num_steps))


@lru_cache(maxsize=1024)
def natural_order(endpoint: str) -> list[int | str]:
    """A sort key that puts worker-2 before worker-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", endpoint)]
