"""What all processes of a pool must agree on, although any of them may miss a command.

Each heartbeat brings the front ends what a worker knows, each `Hello` brings the workers what a
front end knows. Every part has a count that grows with each change; of two parts the one with the
greater count holds. So a worker that was restarted, or cut off while a command went round, learns
of it from whichever process it hears next, and front ends agree whatever they have seen.
"""

import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Policy = Literal["keep", "drain", "abort"]
# Numbers that grow by one. What arrives is far below the 64 bits that a message has room for: a
# process that tells nonsense once must not leave others with a number that they cannot write.
Count = Annotated[int, Meta(ge=0, le=2**40)]
# The trainer's, 2**62 at most over HTTP; an update without one adds one to the last.
Version = Annotated[int, Meta(ge=0, le=2**62 + 2**40)]
# A day over HTTP, and something for rounding.
LeaseSeconds = Annotated[float, Meta(ge=0, le=100_000)]


class PoolWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Weights that a worker has, or that all should have."""

    # Count and id of the update that brought them; the id tells apart two updates of the same count
    # in a pool that was split.
    num_updates: Count = 0
    update_id: str = ""
    # The trainer's number for them.
    version: Version = 0
    # Whether they are those that an engine loads at its start.
    is_own: bool = True
    # Where they lie, for workers that missed them; empty: they came through a group and lie nowhere.
    folder: str = ""
    # Digest of the folder's files.
    files: str = ""

    @property
    def order(self) -> tuple[int, str]:
        """Greater for later weights, equal for the same."""
        return self.num_updates, self.update_id

    def serves_as(self, wanted: "PoolWeights") -> bool:
        """Whether a worker that has these has what all should have."""
        return self.order == wanted.order or (self.is_own and wanted.is_own)


class PoolPause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a client has stopped generation."""

    # Grows with each pause, renewal and end of a pause (`next_count`).
    num_changes: Count = 0
    # None: it goes on.
    mode: Policy | None = None
    # Seconds from when the message was written.
    lease_left_s: LeaseSeconds = 0.0

    @property
    def order(self) -> tuple[int, bool]:
        """Greater for later changes; of two at once, generation going on is the later one."""
        return self.num_changes, self.mode is None


class AdapterRecord(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that serves under a name."""

    version: Version
    folder: str
    # Digest of the folder's files.
    files: str = ""


class PoolAdapters(msgspec.Struct, frozen=True, omit_defaults=True):
    """The LoRA adapters, by name."""

    num_changes: Count = 0
    by_name: dict[str, AdapterRecord] = {}

    @property
    def order(self) -> tuple[int, bytes]:
        """Greater for later changes; of two at once, any, but the same for all processes."""
        return self.num_changes, msgspec.json.encode(self.by_name, order="deterministic")


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


def next_count(known: int) -> int:
    """The count of a change behind `known`.

    The first one's is the time of day in seconds: what a pool does after all its workers have
    forgotten the past counts more than that past, of which a front end may still know.
    """
    return known + 1 if known else int(time.time())
