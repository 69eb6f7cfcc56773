"""What the pool keeps of each worker, and of each job until the job ends."""

import bisect
import dataclasses
import itertools
import math
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import msgspec

from app.pool.prefix_index import PrefixIndex, as_integers
from app.pool.request import Request
from titopool.errors import TitopoolError
from titopool.slots import MAX_NEW, SlotTable, num_kept
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

# How many jobs a key may be ahead of other keys by requests that take kept slots.
MAX_LEAD = 8
# Completions of at most so many engine steps are granted ahead of free slots before the worker has
# seen how fast slots become free: as many as end within two steps, and at most a quarter of the slots.
SHORT_STEPS, STEPS_AHEAD, MAX_AHEAD = 32, 2, 0.25
# Renders (jobs without completions) of all front ends at a worker. Their files wait in the front
# ends, and a thread for images (8 by default at most) never waits for the next one.
MAX_RENDERS = 32
# A worker reports its load to several front ends 10 ms after a change (`workers/serving/server.py`), and
# later while its loop takes many jobs.
REPORT_WITHIN_S = 0.25


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
    # Monotonic time of the last heartbeat of the worker's event loop, or of the addition to the pool.
    last_seen: float
    # Last heartbeat of the present process; None while no process answers.
    heartbeat: Heartbeat | None = None
    # Monotonic time here at which the engine was loaded, by the heartbeat that travelled fastest.
    loaded_at: float = float("inf")
    # The phase in the heartbeat, unless the pool excludes the worker (`app/pool/pool_view.py`).
    phase: str = "unreachable"
    # Why the pool excludes the worker, or that it may soon; "" if the phase says it all.
    reason: str = ""
    # Open jobs that this front end has sent here, by job id, and how far their completions are.
    jobs: dict[int, "OpenJob"] = field(default_factory=dict)
    slots: SlotTable[int] = field(default_factory=SlotTable)
    # Ids of `jobs`: those that are known to have a token, those of which the worker has said that they
    # have started, and those of new requests, of which it says nothing if they start at once.
    with_token: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    new: set[int] = field(default_factory=set)
    num_tokens: int = 0
    # Of `jobs`, those without completions.
    num_renders: int = 0
    # What other front ends have in flight here, as last reported.
    load_of_others: Load = NO_LOAD
    # Tokens of the jobs that this front end has sent since that report.
    num_tokens_since_report: int = 0
    # `num_sequences` at the time of that report, and the monotonic time of the first job after it.
    num_sequences_at_report: int = 0
    first_since_report_s: float = 0.0
    # How many completions the worker wants ahead of free slots, as last reported.
    num_wanted_ahead: int = 0
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

    def silence(self, now: float) -> str:
        """For how long its loop has sent nothing, in words."""
        has_thread = self.heartbeat is not None and self.heartbeat.loop_stood_s
        what = "its event loop has stood" if has_thread else "silent"
        return f"{what} for {now - self.last_seen:.0f} s"

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
        return self.known_load + max(0, num_others) * self.num_tokens_since_report

    @property
    def known_load(self) -> int:
        """The tokens that are known to be in flight here."""
        return self.num_tokens + self.load_of_others.other_tokens

    def may_report_room(self, open_job: "OpenJob") -> bool:
        """Whether a report that is due within milliseconds may show room for a job.

        It then seems full only because the other front ends may have sent as much as this one.
        """
        if not self.num_tokens_since_report or self.facts is None:
            return False
        num_slots = self.facts.max_num_seqs
        num_known = self.num_sequences + self.load_of_others.other_sequences
        return (
            num_known < num_slots - num_kept(num_slots)
            and self.has_adapter_of(open_job.job)
            and time.monotonic() - self.first_since_report_s < REPORT_WITHIN_S
        )

    def has_adapter_of(self, job: Job) -> bool:
        """Whether the worker serves the LoRA adapter of `job`, if `job` has one."""
        return not job.adapter or job.adapter in self.adapters

    @property
    def num_sequences(self) -> int:
        """Completions of this front end that have a slot here, or wait here for one."""
        return self.slots.num_running + self.slots.num_held

    def has_room_for(self, open_job: "OpenJob", *, is_new: bool) -> bool:
        """Whether a completion of `open_job` may be granted here; `is_new`: also as a new request's."""
        return self.num_room_for(open_job, is_new=False) > 0 or (
            is_new and self.num_room_for(open_job, is_new=True) > 0
        )

    def num_room_for(self, open_job: "OpenJob", *, is_new: bool) -> int:
        """How many completions of `open_job` the engine can start now, or soon.

        A render takes no slot, and counts against this front end's share of `MAX_RENDERS`: 1 is room.
        A job that has begun stays at its worker, which takes more of it until the end: a worker that
        drains, or that lacks weights, waits for its jobs.

        Args:
            is_new: with the slots that are kept for requests that have had no whole turn.
        """
        beat, job, has_begun = self.heartbeat, open_job.job, bool(open_job.endpoint)
        if beat is None or (has_begun and open_job.endpoint != self.endpoint):
            return 0
        facts = beat.facts if has_begun else self.facts
        if facts is None or not (has_begun or self.has_adapter_of(job)):
            return 0
        num_front_ends = max(1, beat.num_front_ends)
        if not job.num_sequences:
            return int(self.num_renders < max(1, MAX_RENDERS // num_front_ends))
        num_slots = facts.max_num_seqs
        if is_new:
            return min(MAX_NEW, self._num_free(num_slots, num_front_ends, is_new=True))
        num_ahead = max(self.num_wanted_ahead, num_ahead_of(job, num_slots))
        num_slots += math.ceil(num_ahead / num_front_ends) - num_kept(num_slots)
        return self._num_free(num_slots, num_front_ends, is_new=False)

    def _num_free(self, num_slots: int, num_front_ends: int, *, is_new: bool) -> int:
        """How many of `num_slots` this front end may use now.

        A front end may use all slots that other front ends leave free. Below its fair share it may
        have one completion more at the worker than slots are free: the others send no more until it
        has its share. New requests of a front end may have its fair share in any case, and pass what
        waits at the worker.
        """
        num_own = self.slots.num_running if is_new else self.num_sequences
        # As in `load`: the others are assumed to have sent as much as this front end.
        num_sent = max(0, self.num_sequences - self.num_sequences_at_report)
        num_others = self.load_of_others.other_sequences + (num_front_ends - 1) * num_sent
        num_free = num_slots - num_own - num_others
        num_fair = num_slots // num_front_ends - num_own
        if is_new:
            return max(0, num_free, num_fair)
        if num_free <= 0 and (num_own == 0 or (num_fair > 0 and num_free == 0)):
            return 1
        return max(0, num_free)

    @property
    def num_idle(self) -> int:
        """How many slots besides those kept seem to be free."""
        facts = self.heartbeat.facts if self.heartbeat else None
        num_slots = facts.max_num_seqs if facts else 0
        num_running = self.slots.num_running + self.load_of_others.other_sequences
        return max(0, num_slots - num_kept(num_slots) - num_running)

    def grant(self, open_job: "OpenJob", num: int, *, is_new: bool) -> None:
        """Gives `num` more completions of a job leave to start here; the job may have begun here.

        Those for which no slot seems to be free wait at the worker.

        Args:
            is_new: as in `Generate`.
        """
        job, job_id = open_job.job, open_job.job.job_id
        if job_id not in self.jobs:
            self.jobs[job_id], open_job.endpoint = open_job, self.endpoint
            self.slots.add(job_id, job.num_sequences)
            open_job.request.note_placed(self.name)
            self.num_tokens += job.num_tokens
            self.num_renders += not job.num_sequences
            if not self.num_tokens_since_report:
                self.first_since_report_s = time.monotonic()
            self.num_tokens_since_report += job.num_tokens
            self.prefixes.record(open_job.digests)
        before = self.slots[job_id]
        granted = before.granted + num
        if is_new:
            self.new.add(job_id)
        started = before.started + min(num, max(self.num_idle, MAX_NEW * is_new))
        self.slots.advance(job_id, granted=granted, started=started)

    def remove(self, job_id: int) -> "OpenJob":
        """Removes a job that has ended here."""
        open_job, progress = self.jobs.pop(job_id), self.slots.remove(job_id)
        self.with_token.discard(job_id)
        self.started.discard(job_id)
        self.new.discard(job_id)
        self.num_tokens -= open_job.job.num_tokens_of(progress.num_left)
        self.num_renders -= not open_job.job.num_sequences
        open_job.endpoint = ""
        return open_job

    def record_progress(self, progress: JobProgress) -> None:
        """Records how far one of `jobs` is."""
        job_id = progress.job_id
        (self.with_token if progress.has_token else self.started).add(job_id)
        job, num_left = self.jobs[job_id].job, self.slots[job_id].num_left
        # A job with a token has started, also where the worker has not said how many have.
        started = max(1, progress.num_started)
        after = self.slots.advance(job_id, started=started, ended=progress.num_ended)
        self.num_tokens -= job.num_tokens_of(num_left) - job.num_tokens_of(after.num_left)

    def is_held(self, job_id: int) -> bool:
        """Whether one of `jobs` waits at the worker with all its completions, as far as is known.

        One that found a free slot counts as started: the worker may die before it can say so.
        """
        has_begun = any(job_id in one for one in (self.started, self.with_token, self.new))
        progress = self.slots[job_id]
        return progress.num > 0 and not progress.started and not has_begun

    def record_load_of_others(self, load: Load) -> None:
        self.load_of_others, self.num_tokens_since_report = load, 0
        self.num_wanted_ahead = load.num_wanted_ahead
        self.num_sequences_at_report = self.num_sequences
        self.prefixes.record(as_integers(load.prefixes))

    def record_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Records a heartbeat of the present process, or the first one of a new process."""
        last = self.heartbeat
        # What a loop that stands has not read and not sent is lost as that of a silent process.
        self.heartbeat, self.last_seen = beat, now - beat.loop_stood_s
        if beat.facts is not None:
            self.loaded_at = min(self.loaded_at, now - beat.loaded_s)
        self.is_loading_late &= beat.facts is None
        self.record_load_of_others(
            Load(
                beat.other_sequences,
                beat.other_tokens,
                beat.other_risks,
                beat.apart,
                num_wanted_ahead=beat.num_wanted_ahead,
            )
        )
        if last is not None and last.weights.order != beat.weights.order:
            # The cached blocks were computed with other weights.
            self.prefixes.clear()
        if beat.facts is not None:
            self.prefixes.resize(beat.facts.num_cache_tokens)

    def forget_process(self) -> None:
        """Forgets what is only true of a process that is lost; its jobs stay."""
        self.heartbeat, self.phase, self.reason = None, "unreachable", ""
        self.engine_metrics, self.loaded_at = None, float("inf")
        self.record_load_of_others(NO_LOAD)
        self.prefixes.clear()


@dataclass(eq=False, slots=True)
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
    # Of the worker that has it; "": it has not begun.
    endpoint: str = ""

    def tokens_of(self, num: int, *, is_first: bool) -> float:
        """What `num` of its completions count for its key; `is_first`: with its prompt."""
        num_prompt = 0 if is_first else self.job.num_prompt_tokens
        return (self.job.num_tokens_of(num) - num_prompt) / self.request.weight

    @property
    def location(self) -> str:
        """Where the prompt stood in the client's body."""
        return self.request.locations[self.index]

    def end_as_aborted(self, version: int, adapter_version: int | None) -> TitopoolError | None:
        """Completes the job without a token; `version` is that of the weights that serve.

        Returns:
            Why a stream has no room for its last chunk.
        """
        job = self.job
        completion = Completion(b"", "abort", None, [(version, 0)])
        if job.is_streamed:
            pieces = [(index, completion) for index in range(job.num_sequences)]
            chunk = Chunk(job.job_id, job.attempt, pieces, adapter_version=adapter_version)
            if refusal := self.request.add_chunk(self.index, chunk):
                return refusal
        result = Completed(
            job.job_id, job.attempt, [completion] * job.num_sequences, 0,
            adapter_version=adapter_version,
        )  # fmt: skip
        return self.request.complete(self.index, result)

    def with_death(self) -> "OpenJob":
        return dataclasses.replace(self, num_deaths=self.num_deaths + 1)

    def next_attempt(self, *, group_size: int = 0, until_end: bool = False) -> "OpenJob":
        """The same job with a new attempt number: results of earlier attempts are dropped."""
        job = msgspec.structs.replace(self.job, attempt=self.job.attempt + 1)
        return dataclasses.replace(
            self, job=job, group_size=group_size, until_end=until_end, endpoint=""
        )


class HasTurns(Protocol):
    """What takes turns: `num_tokens` that it had, and `since`, the number of its last turn."""

    num_tokens: float
    since: int


Taker = TypeVar("Taker", bound=HasTurns)


class FairTurns(Generic[Taker]):
    """Those that wait for a turn: next is the one with the fewest tokens, of equal ones the first."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, Taker]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._order)

    def __iter__(self) -> Iterator[Taker]:
        return (taker for *_, taker in self._order)

    @property
    def first(self) -> Taker:
        return self._order[0][2]

    def next_number(self) -> int:
        return next(self._numbers)

    def enter(self, taker: Taker) -> None:
        taker.since = self.next_number()
        bisect.insort(self._order, (taker.num_tokens, taker.since, taker))

    def leave(self, taker: Taker) -> None:
        del self._order[bisect.bisect_left(self._order, (taker.num_tokens, taker.since))]


@dataclass(eq=False)
class Lane:
    """The waiting jobs of one request."""

    jobs: OrderedDict[int, OpenJob]
    # Order of the request's arrival or of its last turn, whichever was later.
    since: int
    # Of what was granted, plus what the request with the fewest had at the first of it.
    num_tokens: float = 0
    # Of its turn so far: completions that were granted, and what they count.
    num_in_turn: int = 0
    tokens_in_turn: float = 0

    @property
    def first(self) -> OpenJob:
        return next(iter(self.jobs.values()))


class KeyJobs:
    """The waiting jobs of one key: its requests have turns.

    Next is the request that had the fewest tokens, unless one without a turn has waited longer. So
    a new request waits for at most one turn of each other one, and no request waits for ever. A turn
    is a job, or `MAX_NEW` completions of a wider one, also where slots become free one by one. Each
    operation takes as long however many jobs wait.
    """

    def __init__(self) -> None:
        # The tokens that it had, for a weight of 1, counted from where keys that come begin; and
        # the order of its arrival or of its last turn, whichever was later.
        self.num_tokens = 0.0
        self.since = 0
        # Requests that had no whole turn, first to last.
        self.new: OrderedDict[Request, Lane] = OrderedDict()
        self._served: dict[Request, Lane] = {}
        self._turns = FairTurns[Lane]()

    def __bool__(self) -> bool:
        return bool(self.new or self._served)

    def __iter__(self) -> Iterator[OpenJob]:
        """The first jobs of all requests in the order of their turns, then the second ones, …"""
        served = iter(self._turns)
        first = [next(served)] if self._is_served_next() else []
        lanes = itertools.chain(first, self.new.values(), served)
        return in_turn(iter(lane.jobs.values()) for lane in lanes)

    def _is_served_next(self) -> bool:
        if not self._turns or not self.new:
            return bool(self._turns)
        return self._turns.first.since < next(iter(self.new.values())).since

    @property
    def first(self) -> OpenJob:
        """The next job; there must be one."""
        return self._turns.first.first if self._is_served_next() else self._first_lane.first

    def new_jobs(self) -> Iterator[OpenJob]:
        """The first jobs of requests that are in their first turn, then of the first one without."""
        for lane in self.new.values():
            yield lane.first
            if not lane.num_in_turn:
                return

    @property
    def _first_lane(self) -> Lane:
        return next(iter(self.new.values()))

    def append(self, open_job: OpenJob) -> None:
        request = open_job.request
        lane = self.new.get(request) or self._served.get(request)
        if lane is None:
            lane = self.new[request] = Lane(OrderedDict(), self._turns.next_number())
        lane.jobs[open_job.job.job_id] = open_job

    def take(self, open_job: OpenJob, num: int, num_tokens: float, *, is_whole: bool) -> None:
        """Counts `num` completions of `num_tokens`; `is_whole`: the job does not wait any more."""
        request = open_job.request
        was_new = request in self.new
        lane = self.new[request] if was_new else self._served[request]
        lane.num_in_turn += num
        lane.tokens_in_turn += num_tokens
        if not is_whole and lane.num_in_turn < MAX_NEW:
            # Its turn goes on.
            return
        least = self._turns.first.num_tokens if self._turns else 0
        self._drop(request)
        if is_whole:
            del lane.jobs[open_job.job.job_id]
        if lane.jobs:
            lane.num_tokens = (least if was_new else lane.num_tokens) + lane.tokens_in_turn
            lane.num_in_turn, lane.tokens_in_turn = 0, 0
            self._served[request] = lane
            self._turns.enter(lane)

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
        self._turns.leave(lane)
        return lane


class WaitingJobs:
    """The queue of jobs that wait for a worker: keys have turns, and a key's requests share them.

    Next is the key that had the fewest tokens for its weight. A key without waiting jobs saves
    nothing up: when one comes, it begins where the first key is. Requests without a key share the
    turns of one key. A job of which some completions are granted waits on for the others.
    """

    def __init__(self) -> None:
        # Jobs of lost workers had their turns: they come first.
        self._returned: OrderedDict[int, OpenJob] = OrderedDict()
        # By name, all that were ever seen: they are those of the server's file.
        self._keys: dict[str, KeyJobs] = {}
        # Of those that have waiting jobs.
        self._turns = FairTurns[KeyJobs]()
        # The tokens of the first key at the last turn.
        self._least = 0.0
        self._requests: dict[int, Request] = {}
        # Jobs that have begun and wait on, by id.
        self._begun: dict[int, OpenJob] = {}

    def __len__(self) -> int:
        return len(self._requests) + len(self._returned)

    @property
    def num_begun(self) -> int:
        """Waiting jobs of which a worker has some completions."""
        return len(self._begun)

    @property
    def begun(self) -> Iterable[OpenJob]:
        """Those jobs, in no order of turns."""
        return self._begun.values()

    def __iter__(self) -> Iterator[OpenJob]:
        """The first jobs of all keys in the order of their turns, then the second ones, …"""
        yield from self._returned.values()
        yield from in_turn(iter(key) for key in self._turns)

    @property
    def first(self) -> OpenJob:
        """The next job; there must be one. Without the generators of an iteration, as it is often used."""
        if self._returned:
            return next(iter(self._returned.values()))
        return self._turns.first.first

    def new_jobs(self) -> Iterator[OpenJob]:
        """Jobs of new requests that may have kept slots, up to the first one that has not begun.

        Those that have begun wait for their own workers, and the next one may go to another. A key
        that is `MAX_LEAD` such jobs ahead of the first has to wait for its turn: many small requests
        would else take all slots from a key with large ones.
        """
        for key in self._turns:
            for new in key.new_jobs():
                num_tokens = new.tokens_of(min(MAX_NEW, new.job.num_sequences), is_first=True)
                if key.num_tokens - self._turns.first.num_tokens <= MAX_LEAD * num_tokens:
                    yield new
                    if not new.endpoint:
                        return

    def is_new(self, open_job: OpenJob) -> bool:
        """Whether its request has not had a whole turn."""
        key = self._keys.get(open_job.job.key_name)
        return key is not None and open_job.request in key.new

    def append(self, open_job: OpenJob) -> None:
        name = open_job.job.key_name
        if name not in self._keys:
            self._keys[name] = KeyJobs()
        if not (key := self._keys[name]):
            key.num_tokens = max(key.num_tokens, self._least)
            self._turns.enter(key)
        key.append(open_job)
        self._requests[open_job.job.job_id] = open_job.request

    def prepend(self, open_jobs: Sequence[OpenJob]) -> None:
        """Puts jobs before all others, in their order."""
        for open_job in reversed(open_jobs):
            self._returned[open_job.job.job_id] = open_job
            self._returned.move_to_end(open_job.job.job_id, last=False)

    def take(self, open_job: OpenJob, num: int, *, is_first: bool = True, is_whole: bool) -> None:
        """Counts `num` completions that are granted for a job's key and request.

        Args:
            is_first: whether they are the first ones of the job.
            is_whole: whether all completions of the job are granted, so that it waits no more.
        """
        job_id, num_tokens = open_job.job.job_id, open_job.tokens_of(num, is_first=is_first)
        self._begun.pop(job_id, None)
        if not is_whole:
            self._begun[job_id] = open_job
        if job_id not in self._requests:
            if is_whole:
                del self._returned[job_id]
            return
        if is_whole:
            del self._requests[job_id]
        self._least = self._turns.first.num_tokens
        key = self._keys[open_job.job.key_name]
        self._turns.leave(key)
        key.take(open_job, num, num_tokens * open_job.request.weight, is_whole=is_whole)
        key.num_tokens += num_tokens
        if key:
            self._turns.enter(key)

    def remove(self, job_id: int) -> OpenJob | None:
        """Removes a job and returns it; None if it does not wait."""
        self._begun.pop(job_id, None)
        request = self._requests.pop(job_id, None)
        if request is None:
            return self._returned.pop(job_id, None)
        key = self._keys[request.jobs[0].key_name]
        open_job = key.remove(request, job_id)
        if not key:
            self._turns.leave(key)
        return open_job

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


def num_ahead_of(job: Job, num_slots: int) -> int:
    """How many completions like those of `job` are granted ahead of free slots from the start on."""
    num_steps = (job.num_tokens - job.num_prompt_tokens) // job.num_sequences
    if not 0 < num_steps <= SHORT_STEPS:
        return 0
    return int(num_slots * min(MAX_AHEAD, STEPS_AHEAD / num_steps))


@lru_cache(maxsize=1024)
def natural_order(endpoint: str) -> list[int | str]:
    """A sort key that puts worker-2 before worker-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", endpoint)]
