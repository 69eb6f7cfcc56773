"""Slots of an engine: how far the completions of each job have come, on both sides of the wire.

A slot is a completion's. The front end grants a job so many completions, the worker starts them as
slots become free, and a completion's slot is free when it ends.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# The share of an engine's slots that is kept for requests that have had no whole turn, at least one
# slot. An engine with fewer slots than the second number keeps none.
KEPT_SHARE, LEAST_SLOTS = 0.02, 16
# With how many completions a new request passes what waits.
MAX_NEW = 8


def num_kept(num_slots: int) -> int:
    """How many of an engine's slots are kept for new requests."""
    return max(1, int(KEPT_SHARE * num_slots)) if num_slots >= LEAST_SLOTS else 0


@dataclass(slots=True)
class Progress:
    """How many of a job's `num` completions have come so far: num >= granted >= started >= ended."""

    num: int
    granted: int = 0
    started: int = 0
    ended: int = 0

    @property
    def num_waiting(self) -> int:
        """Completions that wait in the front end."""
        return self.num - self.granted

    @property
    def num_left(self) -> int:
        """Completions that have not ended."""
        return self.num - self.ended

    @property
    def num_held(self) -> int:
        """Completions that the worker holds for a free slot."""
        return self.granted - self.started

    @property
    def num_running(self) -> int:
        """Completions that the engine has."""
        return self.started - self.ended


class SlotTable(Generic[Key]):
    """The progress of each job in flight, and sums over the jobs."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Progress] = {}
        self.num_held = self.num_running = 0

    def __getitem__(self, key: Key) -> Progress:
        return self._jobs[key]

    def __contains__(self, key: object) -> bool:
        return key in self._jobs

    def __iter__(self) -> Iterator[Key]:
        return iter(self._jobs)

    def add(self, key: Key, num: int) -> Progress:
        """Enters a job of `num` completions, none of them granted."""
        job = self._jobs[key] = Progress(num)
        return job

    def advance(self, key: Key, *, granted: int = 0, started: int = 0, ended: int = 0) -> Progress:
        """Moves a job's completions on: each number is a total, and a smaller one changes nothing.

        A number never exceeds the one before it, so late and repeated messages do no harm.
        """
        job = self._jobs[key]
        self._count(job, -1)
        job.granted = min(job.num, max(job.granted, granted))
        job.started = min(job.granted, max(job.started, started))
        job.ended = min(job.started, max(job.ended, ended))
        self._count(job, 1)
        return job

    def remove(self, key: Key) -> Progress:
        """Takes out a job that has ended, with all that it holds and runs."""
        job = self._jobs.pop(key)
        self._count(job, -1)
        return job

    def _count(self, job: Progress, sign: int) -> None:
        self.num_held += sign * job.num_held
        self.num_running += sign * job.num_running
