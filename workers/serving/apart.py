"""Jobs that may end the engine: those of one message at a time.

A group starts when every other job in the engine has a token, and jobs that come later are held
beside it. So a front end knows that no other job of any front end could end the engine meanwhile
(`app/pool/suspects.py`).
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from titopool.wire.messages import Apart

# A group waits so long for grammars in the engine to end, and if it runs until its end, it holds other
# jobs for so long. The pool must not stand for a long job; later a death may prove nothing.
HOLD_S = 5.0


@dataclass(eq=False)
class Group:
    """The jobs of one message that run apart together."""

    num_left: int
    # The front end.
    owner: bytes
    until: Apart
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    # Whether it has waited for grammars long enough.
    is_due: bool = False


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


class HasRisks(Protocol):
    def __call__(self, *, with_token: bool) -> bool:
        """Whether a job in the engine may end it; `with_token`: also one that has a token."""


class ApartGroups:
    """Groups in the order of their arrival; the first one runs."""

    def __init__(self, has_risks: HasRisks) -> None:
        self._has_risks = has_risks
        self._groups: deque[Group] = deque()
        # Set while jobs that do not run apart may start.
        self._serves_others = asyncio.Event()
        self._serves_others.set()

    def __len__(self) -> int:
        return len(self._groups)

    async def wait_beside(self) -> None:
        """Returns once a job that does not run apart may start."""
        while not self._serves_others.is_set():
            # It may be cleared again before this task goes on.
            await self._serves_others.wait()

    def add(self, num_jobs: int, owner: bytes, until: Apart) -> list[Turn]:
        """A group of at least one job; each job must call `end` of its turn.

        Args:
            owner: the front end.
            until: what the jobs must have before the next group starts.
        """
        group = Group(num_jobs, owner, until)
        self._groups.append(group)
        if group is self._groups[0]:
            self._come_first()
        return [Turn(group, self) for _ in range(num_jobs)]

    def of_others(self, owner: bytes) -> Apart:
        """`until` of the group that runs, if it is not the owner's."""
        first = self._groups[0] if self._groups else None
        return first.until if first and first.owner != owner else ""

    def leave(self, group: Group) -> None:
        group.num_left -= 1
        if group.num_left:
            return
        was_first = group is self._groups[0]
        self._groups.remove(group)
        if not self._groups:
            self._serves_others.set()
        elif was_first:
            self._come_first()

    def _come_first(self) -> None:
        self._serves_others.clear()
        asyncio.get_running_loop().call_later(HOLD_S, self._make_due, self._groups[0])
        self.start_first()

    def _make_due(self, group: Group) -> None:
        group.is_due = True
        self.start_first()

    def start_first(self) -> None:
        """Starts the first group if it may; to be called when the risks in the engine are fewer."""
        first = self._groups[0] if self._groups else None
        if first is None or first.may_start.is_set():
            return
        if self._has_risks(with_token=not first.is_due):
            return
        first.may_start.set()
        if first.until == "end":
            asyncio.get_running_loop().call_later(HOLD_S, self._end_hold, first)

    def _end_hold(self, group: Group) -> None:
        if self._groups and self._groups[0] is group:
            self._serves_others.set()
