"""What a front end asks of a worker beside jobs: weight updates and pauses.

A handler sends an action to the pool's first worker and, once that one has accepted it, to the
others: of two trainers that call at once, through any front ends, one is refused there. What
takes long (`JoinGroup`, `PrepareUpdate`, `ApplyUpdate`, `Pause`) is answered when it is accepted;
`AwaitStep` is answered when it has ended.
"""

from typing import Any, Literal

import msgspec

from titopool.wire.pool_state import Clock, LeaseSeconds, Version
from titopool.wire.pool_state import PauseMode as PauseMode

Backend = Literal["nccl", "gloo"]


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as the trainer announces it; `dtype` is torch's name without `torch.`."""

    name: str
    dtype: str
    shape: list[int]


class JoinGroup(msgspec.Struct, frozen=True, tag="join_group"):
    """Form the group through which weights come."""

    session: str
    # "trl": the group of TRL's client, whose rank 0 is the pool's first worker and listens;
    # "titopool": the trainer is rank 0 and listens.
    protocol: Literal["titopool", "trl"]
    # "auto": NCCL on GPUs, gloo on CPUs.
    backend: Literal["nccl", "gloo", "auto"]
    # Where rank 0 listens.
    host: str
    port: int
    # Of the worker's first process; those of its other processes follow.
    rank: int
    world_size: int
    # UUID of the trainer's GPU, "" if unknown.
    device_uuid: str = ""


class BeginUpdate(msgspec.Struct, frozen=True, tag="begin_update"):
    """Receive these tensors, in this order, packed as `titopool.wire.weight_plan` says."""

    session: str
    update_id: str
    # None: one more than the worker has.
    version: Version | None
    # The greatest clock of the pool's weights that the front end knows.
    clock: Clock
    tensors: list[TensorInfo]
    bucket_bytes: int
    is_partial: bool


class BeginFolder(msgspec.Struct, frozen=True, tag="begin_folder"):
    """Take the weights of a folder of safetensors files."""

    update_id: str
    version: Version | None
    clock: Clock
    folder: str


class ReceiveTensor(msgspec.Struct, frozen=True, tag="receive_tensor"):
    """TRL's way: this tensor comes next, by itself."""

    tensor: TensorInfo
    # Of the update that begins with it, if one does.
    update_id: str
    version: Version | None
    clock: Clock


class PrepareUpdate(msgspec.Struct, frozen=True, tag="prepare_update"):
    """Wait for all tensors, pause as the policy says and clear the caches."""

    update_id: str
    policy: PauseMode
    with_checksum: bool = False
    checksum: str | None = None


class ApplyUpdate(msgspec.Struct, frozen=True, tag="apply_update"):
    """Put the tensors into the model and go on."""

    update_id: str


class FinishTensors(msgspec.Struct, frozen=True, tag="finish_tensors"):
    """TRL's `reset_prefix_cache`: ends an update, if there is one, and clears the caches."""


class AbortUpdate(msgspec.Struct, frozen=True, tag="abort_update"):
    """Drop this update; the weights stay as they are."""

    update_id: str
    reason: str


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave_group"):
    """Close the communicator; with `session` None that of TRL's client, if there is one."""

    session: str | None
    # Whether an update of TRL's client that has all tensors is applied first.
    finishes: bool = False


class AcceptInitialWeights(msgspec.Struct, frozen=True, tag="accept_initial_weights"):
    """The pool goes on with the weights that engines load at their start.

    Sent when no worker has the last update's; a worker with any other weights restarts.
    """

    update_id: str
    clock: Clock


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Stop generating for `lease_s` at most; said again, it renews the lease."""

    mode: PauseMode
    lease_s: LeaseSeconds
    # Of this change, as far as the front end knows.
    clock: Clock = 0


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """End a `Pause`."""

    clock: Clock = 0


class AwaitStep(msgspec.Struct, frozen=True, tag="await_step"):
    """Answer when a step of this name has ended, with what came of it."""

    step: Literal["join", "prepare", "apply", "pause", "finish"]
    # Its session or update.
    of: str


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load a LoRA adapter from a folder, beside the version that serves under its name."""

    name: str
    version: Version
    folder: str


class SwitchAdapter(msgspec.Struct, frozen=True, tag="switch_adapter"):
    """Let a version that was loaded serve; does nothing where it does already."""

    name: str
    version: Version
    # Of this change, as far as the front end knows.
    clock: Clock = 0


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Give up a version that was loaded and does not serve."""

    name: str
    version: Version


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Take an adapter away; requests that run on it end with it."""

    name: str
    clock: Clock = 0


class GetStatus(msgspec.Struct, frozen=True, tag="get_status"):
    """Say what the state is."""


Action = (
    JoinGroup
    | BeginUpdate
    | BeginFolder
    | ReceiveTensor
    | PrepareUpdate
    | ApplyUpdate
    | FinishTensors
    | AbortUpdate
    | LeaveGroup
    | AcceptInitialWeights
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
    """Front end → worker: do this; answered exactly once, in a `CommandDone`."""

    # The worker process that is meant: another ignores the message.
    incarnation: str
    command_id: int
    action: Action


class CommandDone(msgspec.Struct, frozen=True, tag="command_done"):
    """Worker → front end: what came of a command."""

    command_id: int
    result: dict[str, Any]
    # One of `titopool.errors`; "": it went well.
    code: str = ""
    message: str = ""
