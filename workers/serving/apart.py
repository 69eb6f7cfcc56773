"""Jobs that may end the engine: those of one message at a time.

So a front end knows that no suspect of another front end ran beside its own
(`app/pool/suspects.py`).
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from titopool.wire.messages import Apart


@dataclass(eq=False)
class Group:
    """The jobs of one message that run apart together."""

    num_left: int
    # The front end.
    owner: bytes
    until: Apart
    may_start: asyncio.Event = field(default_factory=asyncio.Event)


class Turn:
    """One job's place in its group."""

    def __init__(self, group: Group, groups: "ApartGroups"):
        self._group, self._groups = group, groups
        self._is_over = False

    async def wait(self) -> None:
        """Returns once all earlier groups are done."""
        await self._group.may_start.wait()

    def has_token(self) -> None:
        """The job has its first token."""
        if self._group.until == "token":
            self.end()

    def end(self) -> None:
        """The job has ended; the second call does nothing."""
        if not self._is_over:
            self._is_over = True
            self._groups.leave(self._group)


class ApartGroups:
    """Groups in the order of their arrival; the first one runs."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()

    def add(self, num_jobs: int, owner: bytes, until: Apart) -> list[Turn]:
        """A group of at least one job; each job must call `end` of its turn.

        Args:
            owner: the front end.
            until: what the jobs must have before the next group starts.
        """
        group = Group(num_jobs, owner, until)
        self._groups.append(group)
        self._start_first()
        return [Turn(group, self) for _ in range(num_jobs)]

    def of_others(self, owner: bytes) -> Apart:
        """`until` of the group that runs, if it is not the owner's."""
        first = self._groups[0] if self._groups else None
        return first.until if first and first.owner != owner else ""

    def leave(self, group: Group) -> None:
        group.num_left -= 1
        if not group.num_left:
            self._groups.remove(group)
            self._start_first()

    def _start_first(self) -> None:
        if self._groups:
            self._groups[0].may_start.set()
