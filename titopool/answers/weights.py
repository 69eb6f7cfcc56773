"""Answers of the routes for weights, pauses and adapters."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Seconds = Annotated[float, Meta(ge=0)]


class Joined(msgspec.Struct, kw_only=True):
    """Every worker is in the group."""

    session: str
    num_workers: int


class Begun(msgspec.Struct, kw_only=True):
    """The update is open; the trainer broadcasts."""

    update: str
    version: int
    # Names of tensors.
    missing: list[str]
    ignored: list[str]
    kept: list[str]


class LostWorker(msgspec.Struct, kw_only=True):
    """A worker that was lost while the update was applied."""

    endpoint: str
    error: str


class Committed(msgspec.Struct, kw_only=True):
    """The new weights serve."""

    version: int
    # Not above `version`, but for a trainer that goes back or repeats a version.
    previous_version: int
    # Number of tensors.
    loaded: int
    # Where the tensors waited.
    staging: str
    # Whether requests in flight kept their keys and values at all workers.
    cache: Literal["clear", "keep"]
    update_s: Seconds
    paused_s: Seconds
    prepare_s: Seconds
    apply_s: Seconds
    lost: list[LostWorker]
    checksum: str | UnsetType = UNSET
    # Workers that have loaded and are not in the group.
    outside: list[str] | UnsetType = UNSET
    # Of a folder.
    ignored: list[str] | UnsetType = UNSET


class Aborted(msgspec.Struct, kw_only=True):
    """The update and its group are dropped."""

    update: str
    restarting: list[str]


class Closed(msgspec.Struct, kw_only=True):
    """The group is closed."""

    session: str


class Accepted(msgspec.Struct, kw_only=True):
    """The initial weights serve."""

    weight_version: int
    restarting: list[str]


class WorkerWeights(msgspec.Struct, kw_only=True):
    """The state of a worker's weights; of one that does not answer its phase and endpoint only."""

    endpoint: str
    worker: str | None
    state: str
    session: str | UnsetType | None = UNSET
    group_size: int | UnsetType | None = UNSET
    update: str | UnsetType | None = UNSET
    weight_version: int | UnsetType = UNSET
    # What the ranks wait for.
    awaited: dict[str, Any] | UnsetType | None = UNSET
    last_update: str | UnsetType | None = UNSET
    waits_for_weights: bool | UnsetType = UNSET
    why_behind: str | UnsetType | None = UNSET
    is_paused: bool | UnsetType = UNSET
    lease_left_s: float | UnsetType | None = UNSET
    last_end: str | UnsetType | None = UNSET
    is_written_in_place: bool | UnsetType = UNSET
    is_restarting: bool | UnsetType = UNSET
    last_staging: str | UnsetType | None = UNSET
    last_update_s: Seconds | UnsetType = UNSET
    last_paused_s: Seconds | UnsetType = UNSET
    adapters: dict[str, Any] | UnsetType = UNSET
    adapter_versions: dict[str, int] | UnsetType = UNSET


class Weights(msgspec.Struct, kw_only=True):
    """The weights of all workers."""

    workers: list[WorkerWeights]


class Adapter(msgspec.Struct, kw_only=True):
    """A LoRA adapter that was loaded or unloaded."""

    lora_name: str
    version: int


class Paused(msgspec.Struct, kw_only=True):
    """All workers are paused."""

    status: Literal["paused"]
    is_paused: bool
    lease_s: Seconds


class Resumed(msgspec.Struct, kw_only=True):
    """Generation goes on."""

    status: Literal["resumed"]
    is_paused: bool
    was_paused: bool


class PauseState(msgspec.Struct, kw_only=True):
    """Whether a client has paused any worker."""

    is_paused: bool
    lease_left_s: float | None
