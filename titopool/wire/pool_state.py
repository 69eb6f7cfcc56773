"""The state that all processes of a pool share: weights, pause and adapters.

Workers send their copy in each heartbeat, front ends send theirs in each `Hello`. Each part of the
state has a logical clock (Lamport, 1978), which grows with each change. Of two copies of a part the
one with the greater clock wins. So a worker that restarted, or missed a command, gets the outcome
from the next message of any front end, and all front ends agree.
"""

import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# What an update does with keys and values of earlier weights: requests in flight may keep them, with
# "prefer_keep" where there is other room for the update. No request that begins later reads them.
CacheMode = Literal["clear", "keep", "prefer_keep"]
PauseMode = Literal["keep", "drain", "abort"]
# Far below the 64 bits of MessagePack, so that the clock after an absurd value still fits.
Count = Annotated[int, Meta(ge=0, le=2**40)]
# Logical clock of one part of the state.
Clock = Count
# The trainer's number of weights. Over HTTP at most 2**62; an update without a version adds one.
Version = Annotated[int, Meta(ge=0, le=2**62 + 2**40)]
# A timer that is no number would hold up the event loop's others, and JSON has none.
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
# Over HTTP at most one day; the rest is a margin for rounding.
LeaseSeconds = Annotated[float, Meta(ge=0, le=100_000)]


class PoolWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """The weights that a worker serves, or that all workers should serve."""

    # Of the update. The id orders two updates with the same clock, which a network split can cause.
    clock: Clock = 0
    update_id: str = ""
    version: Version = 0
    # Whether these are the weights that an engine loads at its start.
    is_initial: bool = True
    # From which a worker can load them; empty: they were received through a group.
    folder: str = ""
    # Digest of the folder's files.
    files: str = ""
    # The trainer's own name for the version; empty: it has none.
    label: str = ""
    # Grows when these weights get another label.
    label_clock: Clock = 0

    @property
    def order(self) -> tuple[int, str]:
        """Greater for later weights; equal only for the same weights."""
        return self.clock, self.update_id

    @property
    def order_with_label(self) -> tuple[int, str, int, str]:
        """As `order`; of the same weights, greater for a later label."""
        return *self.order, self.label_clock, self.label

    @property
    def shown_label(self) -> str:
        """The label, by default the version."""
        return self.label or str(self.version)

    def serves_as(self, wanted: "PoolWeights") -> bool:
        """Whether a worker with these weights may serve when `wanted` should serve."""
        return self.order == wanted.order or (self.is_initial and wanted.is_initial)


class PoolPause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a client has paused generation."""

    clock: Clock = 0
    # None: not paused.
    mode: PauseMode | None = None
    # Seconds, counted from when the message was sent.
    lease_left_s: LeaseSeconds = 0.0

    @property
    def order(self) -> tuple[int, bool]:
        """Greater for later changes. At the same clock a resume wins over a pause."""
        return self.clock, self.mode is None


class AdapterRecord(msgspec.Struct, frozen=True, array_like=True):
    """The version of a LoRA adapter that serves."""

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
        """Greater for later changes. At the same clock all processes choose the same value."""
        return self.clock, msgspec.json.encode(self.by_name, order="deterministic")


class PoolState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The shared state of a pool that serves one model."""

    # Empty: the state is not known yet.
    model: str = ""
    weights: PoolWeights = PoolWeights()
    pause: PoolPause = PoolPause()
    adapters: PoolAdapters = PoolAdapters()

    def merged(self, other: "PoolState") -> "PoolState":
        """The later of both copies, part by part; this object itself if `other` has nothing later.

        The state of a pool with another model is ignored.
        """
        if not other.model or other.model != (self.model or other.model):
            return self
        weights = max(self.weights, other.weights, key=lambda one: one.order_with_label)
        pause = max(self.pause, other.pause, key=lambda one: one.order)
        adapters = self.adapters
        if other.adapters != adapters:
            adapters = max(adapters, other.adapters, key=lambda one: one.order)
        if self.model and (weights, pause, adapters) == (self.weights, self.pause, self.adapters):
            return self
        return PoolState(other.model, weights, pause, adapters)


def next_clock(known: int) -> int:
    """The clock of a new change.

    Without a known change (`known` is 0) it is the Unix time. All workers may have restarted and lost
    earlier changes that a front end still has. The Unix time is greater than the clocks of those.
    """
    return known + 1 if known else int(time.time())
