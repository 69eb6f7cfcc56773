"""Answers of the routes for who runs the server."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from titopool.answers.weights import Seconds


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


class Model(msgspec.Struct, kw_only=True):
    """The base model or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    vocab_size: int
    # Of an adapter.
    version: int | UnsetType = UNSET


class Models(msgspec.Struct, kw_only=True):
    """What /v1/models lists."""

    object: Literal["list"]
    data: list[Model]


class WeightInfo(msgspec.Struct, kw_only=True):
    """The label of the version that serves."""

    weight_version: str
