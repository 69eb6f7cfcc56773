"""Which waiting job goes next, and to which worker.

`app/pool/state.py` asks a policy for one job at a time and keeps what it looks at: the workers'
loads and prefixes. To add one: a class here, its name in `ROUTING_POLICIES` and in
`titopool.settings.config.PLACEMENTS`.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from app.pool.records import OpenJob, Worker
from app.pool.waiting_jobs import WaitingJobs

# How much more than the least loaded worker, in mean loads, one may have that holds the
# whole prompt already. In `benchmarks/placement.py`, conversations on 8 workers found four
# points less of their prompts cached at 0.25, and one more at 1.
AFFINITY_SLACK = 0.5
# A prompt belongs to a worker that holds so much of it, and may wait for it.
HOME_SHARE = 0.5
# Waiting jobs that are looked through for one that belongs to a worker with room, and how
# often the first of them may be passed over.
MAX_LOOKED_AT = 64
MAX_PASSED_OVER = 32


class Choice(NamedTuple):
    """A waiting job, and the worker that it goes to."""

    worker: Worker
    open_job: OpenJob


class RoutingPolicy(Protocol):
    """One for each pool: it may keep a state."""

    def choose(self, waiting: WaitingJobs, ready: Sequence[Worker]) -> Choice | None:
        """What to assign next; None when the first of `waiting` fits nowhere now."""


class LeastLoaded:
    """The first job to the worker with the fewest tokens under way."""

    def choose(self, waiting: WaitingJobs, ready: Sequence[Worker]) -> Choice | None:
        roomy = with_room(waiting, ready)
        if not roomy:
            return None
        return Choice(min(roomy, key=lambda worker: worker.load), waiting.first)


class RoundRobin:
    """The first job to each worker in turn."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, waiting: WaitingJobs, ready: Sequence[Worker]) -> Choice | None:
        roomy = with_room(waiting, ready)
        if not roomy:
            return None
        self._num_chosen += 1
        return Choice(roomy[(self._num_chosen - 1) % len(roomy)], waiting.first)


class PrefixAffinity:
    """Prompts to workers that hold their beginning, where the loads allow it.

    The first job goes to the worker that holds most of it among those whose load is in bounds
    (`best_worker`). When some are full and the first job belongs to one of them, it is passed
    over: a place that gets free elsewhere is given to a job that belongs there, or to one that
    belongs nowhere. Else jobs would follow the places, not their prefixes. Without a hit all
    this is what `LeastLoaded` does.
    """

    def __init__(self) -> None:
        # The first job of the queue, and how often another went before it.
        self._first: OpenJob | None = None
        self._num_passed_over = 0

    def choose(self, waiting: WaitingJobs, ready: Sequence[Worker]) -> Choice | None:
        first = waiting.first
        roomy = with_room(waiting, ready)
        if not roomy:
            return None
        worker = best_worker(first, roomy, ready)
        is_full = len(roomy) < len(ready)
        if not is_full or is_home(worker, first) or not has_home(first, ready):
            return Choice(worker, first)
        if first is not self._first:
            self._first, self._num_passed_over = first, 0
        if self._num_passed_over == MAX_PASSED_OVER:
            return Choice(worker, first)
        chosen = _next_for(worker, waiting, ready)
        self._num_passed_over += chosen is not first
        return Choice(worker, chosen)


def with_room(waiting: WaitingJobs, ready: Sequence[Worker]) -> list[Worker]:
    """The workers that can run the first job soon."""
    ahead = sends_ahead(waiting, ready)
    return [worker for worker in ready if worker.has_room_for(waiting.first.job, ahead=ahead)]


def sends_ahead(waiting: WaitingJobs, ready: Sequence[Worker]) -> bool:
    """Whether so many wait that workers may get more than they can run now.

    The last ones are kept for the places that get free first: one engine would queue what
    another has room for.
    """
    # All workers but one; they are alike.
    num_slots_elsewhere = sum(worker.num_slots for worker in ready[1:])
    return len(waiting) * waiting.first.job.num_sequences > num_slots_elsewhere


def best_worker(open_job: OpenJob, roomy: Sequence[Worker], ready: Sequence[Worker]) -> Worker:
    """The one of `roomy` that holds most of the prompt, unless it has much more to do.

    It may exceed the least loaded one by `AFFINITY_SLACK` times the mean load, times the
    share of the prompt that it holds: so a short prefix outweighs little, a prefix that all
    share spreads over all workers, and an idle worker gets work. Of equal ones the least
    loaded.
    """
    least = min(roomy, key=lambda worker: worker.load)
    digests = open_job.digests
    if not digests or len(roomy) == 1:
        return least
    mean_load = sum(worker.load for worker in ready) / len(ready)
    slack = AFFINITY_SLACK * mean_load / len(digests)
    best, most_found = least, least.prefixes.num_found(digests)
    for worker in roomy:
        num_found = worker.prefixes.num_found(digests)
        if worker.load - least.load > slack * num_found:
            continue
        if num_found > most_found or (num_found == most_found and worker.load < best.load):
            best, most_found = worker, num_found
    return best


def is_home(worker: Worker, open_job: OpenJob) -> bool:
    """Whether the prompt belongs to `worker`."""
    digests = open_job.digests
    # Its prefixes are found from the first block on: one look says whether there are so many.
    return bool(digests) and worker.prefixes.holds(digests[int(HOME_SHARE * (len(digests) - 1))])


def has_home(open_job: OpenJob, ready: Sequence[Worker]) -> bool:
    """Whether the prompt belongs to any worker."""
    return any(is_home(worker, open_job) for worker in ready)


def _next_for(worker: Worker, waiting: WaitingJobs, ready: Sequence[Worker]) -> OpenJob:
    """Which goes to `worker` when the first belongs to another one.

    The first job that belongs to `worker`, else the first that belongs nowhere, else the first.
    """
    ahead = sends_ahead(waiting, ready)
    homeless = None
    for open_job in islice(waiting, MAX_LOOKED_AT):
        is_mine = is_home(worker, open_job)
        if not is_mine and (homeless or has_home(open_job, ready)):
            continue
        if worker.has_room_for(open_job.job, ahead=ahead):
            if is_mine:
                return open_job
            homeless = open_job
    return homeless or waiting.first


ROUTING_POLICIES: dict[str, type[RoutingPolicy]] = {
    "prefix": PrefixAffinity,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
