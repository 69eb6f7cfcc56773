"""Commands from a front end to workers: weight updates, pauses and LoRA adapters.

A command that two clients may send at once goes to the pool's first worker, and to the others once
the first worker has accepted it. So the first worker decides between two trainers, through any front
ends. Other commands go to all workers at once. `JoinGroup`, `AnnounceTensors`, `EndTensors`,
`PrepareUpdate`, `ApplyUpdate`, `ClearCaches` and `FetchWeights` may take long and are answered on
acceptance. The answer to `AwaitStep` comes when such a step has ended.
"""

from typing import Any, Literal

import msgspec

from titopool.wire.pool_state import (
    CacheMode,
    Clock,
    Count,
    Finite,
    LeaseSeconds,
    PauseMode,
    PoolWeights,
    Version,
)

Backend = Literal["nccl", "gloo"]
# How a trainer calls. "named": its calls name session and update, and an update is one list of tensors.
# "lists": an update has a start, lists and an end, and the calls name nothing. "tensors": each call
# brings one tensor, the calls name nothing, and none begins or ends an update. A worker has one
# session, so calls that name nothing mean it if its trainer calls so.
Calls = Literal["named", "lists", "tensors"]
# vLLM's default size of a chunk (`packed_buffer_size_bytes`).
PACKED_BYTES = 2**30


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that the trainer will send. `dtype` is torch's name without `torch.`."""

    name: str
    dtype: str
    shape: list[int]


class JoinGroup(msgspec.Struct, frozen=True, tag="join_group"):
    """Join the process group through which the trainer sends weights."""

    session: str
    # Who is rank 0 and listens. "vllm" (`titopool/wire/rendezvous.py`): the trainer. "trl" (TRL's
    # client up to 1.10): the first worker.
    protocol: Literal["vllm", "trl"]
    # "auto": NCCL on GPUs, gloo on CPUs.
    backend: Literal["nccl", "gloo", "auto"]
    # Where rank 0 listens; "" and 0 with `nccl_id`.
    host: str
    port: int
    # Of the worker's first process; the worker's other processes have the next ranks.
    rank: int
    world_size: int
    # Of the trainer's GPU; empty: unknown.
    device_uuid: str = ""
    # NCCL's id, 128 bytes: the ranks of protocol "vllm" join without a store. Empty: with a store.
    nccl_id: bytes = b""
    # A trainer of "lists" may begin to listen after its call, and it closes nothing, so that another
    # session may replace this one.
    calls: Calls = "named"
    # For lists of tensors that do not say it: whether tensors come in chunks, of how many bytes.
    packed: bool = False
    packed_bytes: int = PACKED_BYTES

    @property
    def trainer_listens(self) -> bool:
        """Whether the trainer listens at the group's address."""
        return self.protocol == "vllm" and bool(self.host)

    @property
    def worker_listens(self) -> bool:
        """Whether the first process of the worker that gets this listens there."""
        return self.protocol == "trl" and self.rank == 0


class BeginFolder(msgspec.Struct, frozen=True, tag="begin_folder"):
    """Stage the weights in a folder of safetensors files."""

    update_id: str
    version: Version | None
    clock: Clock
    folder: str
    # The trainer's own name for the version; "": the version.
    label: str = ""
    # Digest of the files at the first worker, or in the pool's state; "": this worker's counts.
    files: str = ""
    cache: CacheMode = "clear"


class AnnounceTensors(msgspec.Struct, frozen=True, tag="announce_tensors"):
    """Receive these tensors next, in this order, in the chunks of `titopool/wire/weight_plan.py`.

    "named": they are all of the update that begins. "tensors": one tensor, which begins an update if
    none has begun. "lists": without a `list_id` an update begins, or goes on that lacks parts of
    layers, and each list has an id. The list that is being received, or was received last, is not
    received twice: a client repeats a call whose connection was cut.
    """

    calls: Calls
    # What begins. Of a list: the first worker's update; "" at the first worker.
    update_id: str = ""
    # None: the worker's version plus one.
    version: Version | None = None
    # The latest clock of the pool's weights that the front end knows.
    clock: Clock = 0
    # The clock of the weights that a part of a model is added to; None: `clock`.
    base_clock: Clock | None = None
    # "": that of such a trainer, at the first worker.
    session: str = ""
    # Of a list, empty: the last list of the session.
    tensors: list[TensorInfo] = []
    list_id: str = ""
    # Whether the tensors come in chunks, of how many bytes, else each in a broadcast of its own. None:
    # as the session says.
    packed: bool | None = None
    packed_bytes: int | None = None
    # Of "named", here and below.
    is_partial: bool = False
    # The pause mode where generation must stand before the first tensor arrives; None: the
    # worker's default.
    policy: PauseMode | None = None
    # Whether the commit will ask for a checksum.
    with_checksum: bool = False
    cache: CacheMode = "clear"


class EndTensors(msgspec.Struct, frozen=True, tag="end_tensors"):
    """The client ends an update of lists: is it ready to be committed?"""

    # The first worker's; None at the first worker.
    update_id: str | None = None
    # Whether an update counts that was ended before and lacked parts of layers. Without one, the step
    # `finish` commits an update that came tensor by tensor, or else empties the caches.
    is_last_call: bool = False
    # The trainer's own name for the version that the update makes, now or with a later end.
    label: str = ""


class PrepareUpdate(msgspec.Struct, frozen=True, tag="prepare_update"):
    """Wait for all tensors, pause generation in the mode `policy`, and clear the caches."""

    update_id: str
    # None: the mode that costs requests in flight least.
    policy: PauseMode | None
    with_checksum: bool = False
    checksum: str | None = None


class ApplyUpdate(msgspec.Struct, frozen=True, tag="apply_update"):
    """Write the staged tensors into the model and resume generation."""

    update_id: str


class ClearCaches(msgspec.Struct, frozen=True, tag="clear_caches"):
    """Empty the prefix, multimodal and encoder caches."""

    # Of the step.
    name: str


class SetLabel(msgspec.Struct, frozen=True, tag="set_label"):
    """Keep `label` as the trainer's own name for the version that serves."""

    label: str
    # The next clock of the label, as far as the front end knows.
    clock: Clock = 0


class ReadChecksums(msgspec.Struct, frozen=True, tag="read_checksums"):
    """Answer with a digest of each parameter of the model."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort_requests"):
    """End requests with the tokens that they have, also those that wait in front ends' queues."""

    # The clients' ids, of any key or as `owned_id` makes them; None: all requests.
    request_ids: list[str] | None


class GatherRequests(msgspec.Struct, frozen=True, tag="gather_requests"):
    """Ask all front ends for their requests in flight, and answer with what came."""

    # Of each front end; goes on to them.
    limit: Count


class CountTokens(msgspec.Struct, frozen=True, tag="count_tokens"):
    """Answer with the tokens that unfinished completions of these requests have."""

    # The clients' ids.
    request_ids: list[str]


class TryConnections(msgspec.Struct, frozen=True, tag="try_connections"):
    """Open a TCP connection to each of these workers of the pool, and close it.

    The result's `faults` has, by endpoint, why it cannot be opened.
    """

    endpoints: list[str]
    # Of each connection.
    timeout_s: Finite


class AbortUpdate(msgspec.Struct, frozen=True, tag="abort_update"):
    """Drop an update. The old weights serve."""

    # None: the one that a trainer of `calls` sends.
    update_id: str | None
    reason: str
    calls: Calls = "named"
    # Whether the group ends too, although this worker could use it again.
    leaves: bool = False


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave_group"):
    """Leave the group of a session."""

    # None: that of a trainer of `calls`, if there is one.
    session: str | None
    calls: Calls = "named"
    # Whether a complete update whose end nobody says is committed first.
    finishes: bool = False


class AcceptInitialWeights(msgspec.Struct, frozen=True, tag="accept_initial_weights"):
    """Serve the initial weights from now on.

    Sent when no worker has the weights of the last update. A worker with other weights restarts.
    """

    update_id: str
    clock: Clock


class OfferWeights(msgspec.Struct, frozen=True, tag="offer_weights"):
    """Let another worker read the model of these weights, if this worker serves them.

    The result's `peers` has port and key of each process; the worker ends the offer.
    """

    weights: PoolWeights


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Where a process gives its part of the model. `address` is host:port."""

    address: str
    key: str


class FetchWeights(msgspec.Struct, frozen=True, tag="fetch_weights"):
    """Take the pool's weights from another worker, process by process."""

    weights: PoolWeights
    # By rank; empty: no worker offers the weights.
    peers: list[Peer]
    # Why there is none, for the log.
    reason: str = ""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Pause generation for at most `lease_s` seconds, or renew the lease of a pause."""

    mode: PauseMode
    lease_s: LeaseSeconds
    # The next clock of the pool's pause, as far as the front end knows.
    clock: Clock = 0
    # Whether calls of vLLM's routes for weights, folders and commits renew the lease.
    is_renewed: bool = False


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """End a `Pause`."""

    clock: Clock = 0


class AwaitStep(msgspec.Struct, frozen=True, tag="await_step"):
    """Answer with the outcome of a step when the step has ended."""

    step: Literal["join", "receive", "prepare", "apply", "finish", "clear", "fetch"]
    # The session, list or update of the step.
    target: str


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load a version of a LoRA adapter from a folder. The present version still serves."""

    name: str
    version: Version
    folder: str
    # As in `BeginFolder`.
    files: str = ""


class SwitchAdapter(msgspec.Struct, frozen=True, tag="switch_adapter"):
    """Serve a loaded version. Does nothing if it serves already."""

    name: str
    version: Version
    # The next clock of the pool's adapters, as far as the front end knows.
    clock: Clock = 0


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Unload a version that does not serve."""

    name: str
    version: Version


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Unload an adapter. Requests in flight finish with it."""

    name: str
    clock: Clock = 0


class GetStatus(msgspec.Struct, frozen=True, tag="get_status"):
    """Report the state of weights, pause and adapters."""


Action = (
    JoinGroup
    | BeginFolder
    | AnnounceTensors
    | EndTensors
    | PrepareUpdate
    | ApplyUpdate
    | ClearCaches
    | SetLabel
    | ReadChecksums
    | AbortRequests
    | GatherRequests
    | CountTokens
    | TryConnections
    | AbortUpdate
    | LeaveGroup
    | AcceptInitialWeights
    | OfferWeights
    | FetchWeights
    | Pause
    | Resume
    | AwaitStep
    | LoadAdapter
    | SwitchAdapter
    | DropAdapter
    | UnloadAdapter
    | GetStatus
)


class Command(msgspec.Struct, frozen=True, tag="command"):
    """Front end → worker. Answered by exactly one `CommandDone`."""

    # A worker process with another incarnation ignores the message.
    incarnation: str
    command_id: int
    action: Action


class CommandDone(msgspec.Struct, frozen=True, tag="command_done"):
    """Worker → front end: the outcome of a command."""

    command_id: int
    result: dict[str, Any]
    # One of `titopool/errors.py`; empty: success.
    code: str = ""
    message: str = ""
