"""Commands from a front end to workers: weight updates, pauses and LoRA adapters.

A command that two clients may send at once goes to the pool's first worker, and to the others once
the first worker has accepted it. So the first worker decides between two trainers, through any front
ends. Other commands go to all workers at once. `JoinGroup`, `PrepareUpdate`, `ApplyUpdate` and `FinishTensors` take
long and are answered on acceptance. The answer to `AwaitStep` comes when such a step has ended.
"""

from typing import Any, Literal

import msgspec

from titopool.wire.pool_state import Clock, LeaseSeconds, PauseMode, Version

Backend = Literal["nccl", "gloo"]


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


class BeginUpdate(msgspec.Struct, frozen=True, tag="begin_update"):
    """Receive these tensors, in this order, in the chunks of `titopool/wire/weight_plan.py`."""

    session: str
    update_id: str
    # None: the worker's version plus one.
    version: Version | None
    # The latest clock of the pool's weights that the front end knows.
    clock: Clock
    tensors: list[TensorInfo]
    # 0: each tensor is broadcast alone.
    chunk_bytes: int
    is_partial: bool
    # The pause mode where generation must stand before the first tensor arrives; None: the
    # worker's default.
    policy: PauseMode | None = None


class BeginFolder(msgspec.Struct, frozen=True, tag="begin_folder"):
    """Stage the weights in a folder of safetensors files."""

    update_id: str
    version: Version | None
    clock: Clock
    folder: str


class ReceiveTensor(msgspec.Struct, frozen=True, tag="receive_tensor"):
    """Receive this tensor next, in a broadcast of its own (TRL's client)."""

    tensor: TensorInfo
    # For the update that this tensor begins, if none has begun.
    update_id: str
    version: Version | None
    clock: Clock


class PrepareUpdate(msgspec.Struct, frozen=True, tag="prepare_update"):
    """Wait for all tensors, pause generation in the mode `policy`, and clear the caches."""

    update_id: str
    policy: PauseMode
    with_checksum: bool = False
    checksum: str | None = None


class ApplyUpdate(msgspec.Struct, frozen=True, tag="apply_update"):
    """Write the staged tensors into the model and resume generation."""

    update_id: str


class FinishTensors(msgspec.Struct, frozen=True, tag="finish_tensors"):
    """Commit the update of TRL's client, if there is one, and clear the caches."""


class AbortUpdate(msgspec.Struct, frozen=True, tag="abort_update"):
    """Drop this update. The old weights serve."""

    update_id: str
    reason: str


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave_group"):
    """Leave the group of a session; with `session` None the group of TRL's client, if any."""

    session: str | None
    # Whether a complete update of TRL's client is committed first.
    finishes: bool = False


class AcceptInitialWeights(msgspec.Struct, frozen=True, tag="accept_initial_weights"):
    """Serve the initial weights from now on.

    Sent when no worker has the weights of the last update. A worker with other weights restarts.
    """

    update_id: str
    clock: Clock


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Pause generation for at most `lease_s` seconds, or renew the lease of a pause."""

    mode: PauseMode
    lease_s: LeaseSeconds
    # The next clock of the pool's pause, as far as the front end knows.
    clock: Clock = 0


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """End a `Pause`."""

    clock: Clock = 0


class AwaitStep(msgspec.Struct, frozen=True, tag="await_step"):
    """Answer with the outcome of a step when the step has ended."""

    step: Literal["join", "prepare", "apply", "finish"]
    # The session or update of the step.
    target: str


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load a version of a LoRA adapter from a folder. The present version still serves."""

    name: str
    version: Version
    folder: str


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
