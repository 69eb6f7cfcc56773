"""What all processes of a pool must agree on, although any of them may miss a command.

Workers tell their state in each heartbeat, front ends tell theirs in each `Hello`. Every part has a
logical clock (Lamport, 1978) that grows with each change; of two versions of a part the one with the
greater clock holds. So a worker that was restarted, or that missed a command while it could not be
reached, learns the outcome from the next process it hears, and all front ends agree.
"""

import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PauseMode = Literal["keep", "drain", "abort"]
# Bounded far below the 64 bits of MessagePack: after one absurd value, the next greater number must
# still fit into a message.
Count = Annotated[int, Meta(ge=0, le=2**40)]
# A part's logical clock.
Clock = Count
# The trainer's, 2**62 at most over HTTP; an update without one adds one to the last.
Version = Annotated[int, Meta(ge=0, le=2**62 + 2**40)]
# A day over HTTP, and something for rounding.
LeaseSeconds = Annotated[float, Meta(ge=0, le=100_000)]


class PoolWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Weights that a worker has, or that all should have."""

    # The update that brought them. The id tells apart two updates with the same clock, which a pool
    # has that was split for a while.
    clock: Clock = 0
    update_id: str = ""
    # The trainer's number for them.
    version: Version = 0
    # Whether they are those that an engine loads at its start.
    is_initial: bool = True
    # Where they lie, for workers that missed them; empty: they came through a group and lie nowhere.
    folder: str = ""
    # Digest of the folder's files.
    files: str = ""

    @property
    def order(self) -> tuple[int, str]:
        """Greater for later weights, equal for the same."""
        return self.clock, self.update_id

    def serves_as(self, wanted: "PoolWeights") -> bool:
        """Whether a worker that has these has what all should have."""
        return self.order == wanted.order or (self.is_initial and wanted.is_initial)


class PoolPause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a client has stopped generation."""

    # Of the last pause, renewal or end of a pause.
    clock: Clock = 0
    # None: it goes on.
    mode: PauseMode | None = None
    # Seconds from when the message was written.
    lease_left_s: LeaseSeconds = 0.0

    @property
    def order(self) -> tuple[int, bool]:
        """Greater for later changes; of two at once, generation going on is the later one."""
        return self.clock, self.mode is None


class AdapterRecord(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that serves under a name."""

    version: Version
    folder: str
    # Digest of the folder's files.
    files: str = ""


class PoolAdapters(msgspec.Struct, frozen=True, omit_defaults=True):
    """The LoRA adapters, by name."""

    clock: Clock = 0
    by_name: dict[str, AdapterRecord] = {}

    @property
    def order(self) -> tuple[int, bytes]:
        """Greater for later changes; of two at once, any, but the same for all processes."""
        return self.clock, msgspec.json.encode(self.by_name, order="deterministic")


class PoolState(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is shared, of the pool that serves `model`."""

    # Empty: nothing is known yet.
    model: str = ""
    weights: PoolWeights = PoolWeights()
    pause: PoolPause = PoolPause()
    adapters: PoolAdapters = PoolAdapters()

    def merged(self, other: "PoolState") -> "PoolState":
        """What is known with `other`; the same object if that says nothing new.

        Of a pool with another model nothing is taken.
        """
        if not other.model or other.model != (self.model or other.model):
            return self
        weights = max(self.weights, other.weights, key=lambda one: one.order)
        pause = max(self.pause, other.pause, key=lambda one: one.order)
        adapters = self.adapters
        if other.adapters != adapters:
            adapters = max(adapters, other.adapters, key=lambda one: one.order)
        if self.model and (weights, pause, adapters) == (self.weights, self.pause, self.adapters):
            return self
        return PoolState(other.model, weights, pause, adapters)


def next_clock(known: int) -> int:
    """The clock of the change after `known`; 0: no change is known.

    The first change takes the time of day in seconds. A front end may still know changes from
    before all workers forgot theirs; the new clock is greater than any of those.
    """
    return known + 1 if known else int(time.time())
