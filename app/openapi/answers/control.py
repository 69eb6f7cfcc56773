"""Answers of the routes for weights, pauses, adapters, caches and operators."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Seconds = Annotated[float, Meta(ge=0)]


class Message(msgspec.Struct, kw_only=True):
    """The call is done."""

    message: str


class Success(msgspec.Struct, kw_only=True):
    """The call is done."""

    success: bool
    message: str | UnsetType = UNSET


# ---- operators ---------------------------------------------------------------------------


class Health(msgspec.Struct, kw_only=True):
    """The process answers."""

    status: Literal["ok"]


class Live(Health, kw_only=True):
    """The process answers; its id is for clients with a key, if the server has one."""

    pid: int | UnsetType = UNSET


class ReadyWorker(msgspec.Struct, kw_only=True):
    """A worker; values are null while it does not answer."""

    worker: str | None
    phase: str
    phase_s: float | None
    silent_s: float
    weight_version: int | None
    # For clients with a key, if the server has one.
    endpoint: str | UnsetType = UNSET
    reason: str | UnsetType | None = UNSET


class Ready(msgspec.Struct, kw_only=True):
    """The pool."""

    ready: bool
    draining: bool
    num_ready: int
    workers: list[ReadyWorker]


class WorkerEnd(msgspec.Struct, kw_only=True):
    """Why and when the last process of a worker ended; `ended_at` is Unix time."""

    reason: str
    ended_at: float
    ago_s: Seconds


class WorkerOverview(msgspec.Struct, kw_only=True):
    """A worker; of one that does not answer only the first fields."""

    worker: str | None
    endpoint: str
    phase: str
    reason: str | None
    phase_s: float | None
    silent_s: float
    last_end: WorkerEnd | None
    model: str | UnsetType | None = UNSET
    dtype: str | UnsetType | None = UNSET
    vllm_version: str | UnsetType | None = UNSET
    weight_version: int | UnsetType = UNSET
    weight_label: str | UnsetType = UNSET
    loop_stood_s: float | UnsetType = UNSET
    num_sequences: int | UnsetType = UNSET
    num_slots: int | UnsetType | None = UNSET
    num_prompt_tokens: int | UnsetType = UNSET
    num_cached_tokens: int | UnsetType = UNSET
    num_completion_tokens: int | UnsetType = UNSET
    num_completed_jobs: int | UnsetType = UNSET
    num_failed_jobs: int | UnsetType = UNSET


class Overview(msgspec.Struct, kw_only=True):
    """All workers, in the order of their endpoints."""

    draining: bool
    workers: list[WorkerOverview]


class OpenRequest(msgspec.Struct, kw_only=True):
    """A request in flight; of another key's, `id`, `client` and `key` are null."""

    id: str | None
    job_ids: list[str]
    route: str
    client: str | None
    key: str | None
    age_s: Seconds
    phase: Literal["checking", "waiting", "running", "streaming", "writing"]
    num_prompts: int
    num_completions: int
    tokens_in: int
    tokens_out: int
    workers: list[str]
    model: str
    is_aborted: bool


class OpenRequests(msgspec.Struct, kw_only=True):
    """The oldest requests in flight in all front ends."""

    requests: list[OpenRequest]
    num_requests: int
    num_front_ends: int
    num_missing: int


class MetricsHistory(msgspec.Struct, kw_only=True):
    """Samples of the last minutes, in columns; times are Unix times in seconds."""

    now: float
    interval_s: Seconds
    span_s: Seconds
    time_s: list[float]
    # By name; null where a sample has no figure.
    figures: dict[str, list[float | None]]
    # By the error's code; null: nobody counts requests.
    errors_per_s: dict[str, list[float]] | None
    # Of the last sample, by worker.
    worker_tokens_per_s: dict[str, float]


class WorldSize(msgspec.Struct, kw_only=True):
    """The number of ranks."""

    world_size: int


class Drained(msgspec.Struct, kw_only=True):
    """The worker has begun to leave."""

    worker: str
    phase: str


class ConnectionFault(msgspec.Struct, kw_only=True):
    """A worker that cannot connect to a peer; names are null where a worker never answered."""

    worker: str | None
    endpoint: str
    peer: str | None
    peer_endpoint: str | None
    reason: str


class Connections(msgspec.Struct, kw_only=True):
    """The number of pairs of workers that were tried, and those that cannot connect."""

    num_tried: int
    faults: list[ConnectionFault]


class Scaled(msgspec.Struct, kw_only=True):
    """Workers start, or drain and end."""

    num_workers: int
    num_before: int


# ---- weights -----------------------------------------------------------------------------


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


class Finished(msgspec.Struct, kw_only=True):
    """A finish: with the fields of a commit, unless parts of layers wait for the rest."""

    message: str
    waits_for: str | UnsetType = UNSET
    version: int | UnsetType = UNSET
    previous_version: int | UnsetType = UNSET
    loaded: int | UnsetType = UNSET
    staging: str | UnsetType = UNSET
    update_s: Seconds | UnsetType = UNSET
    paused_s: Seconds | UnsetType = UNSET
    prepare_s: Seconds | UnsetType = UNSET
    apply_s: Seconds | UnsetType = UNSET
    lost: list[LostWorker] | UnsetType = UNSET
    checksum: str | UnsetType = UNSET


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


# ---- pauses and aborts -------------------------------------------------------------------


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


class AbortedRequests(msgspec.Struct, kw_only=True):
    """The number of jobs that were ended."""

    status: Literal["aborted"]
    aborted: int


class SGLangPaused(msgspec.Struct, kw_only=True):
    """All workers are paused."""

    message: str
    status: Literal["ok"]
    lease_s: Seconds


class SGLangResumed(msgspec.Struct, kw_only=True):
    """Generation goes on."""

    message: str
    status: Literal["ok"]


class DiskAnswer(msgspec.Struct, kw_only=True):
    """All workers serve the folder's weights."""

    success: bool
    message: str
    num_paused_requests: int


# ---- settings and versions ---------------------------------------------------------------


class ServerInfo(msgspec.Struct, kw_only=True):
    """Settings that trainers read: an object with `config_format=json`, else its JSON as a string."""

    vllm_config: str | dict[str, Any]


class WeightInfo(msgspec.Struct, kw_only=True):
    """The label of the version that serves."""

    weight_version: str


class Labelled(msgspec.Struct, kw_only=True):
    """The version that serves has another label."""

    success: bool
    new_version: str


class Checksums(msgspec.Struct, kw_only=True):
    """Digests by the name of a parameter."""

    checksums: dict[str, str]


class Compared(msgspec.Struct, kw_only=True):
    """Whether the digests are those of the baseline."""

    match: bool
    mismatches: list[str]
