"""Bodies of the routes for weight updates, pauses and LoRA adapters."""

from typing import Annotated

import msgspec
from msgspec import Meta

from app.control.pool_commands import MAX_LEASE_S
from app.route.fields import Names, Port, Shapes, Size, WeightVersion
from titopool.wire.commands import Backend
from titopool.wire.pool_state import CacheMode, PauseMode
from titopool.wire.weight_plan import DEFAULT_CHUNK_BYTES

# The id of a session (chosen by the trainer) or of an update (chosen by the server).
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class InitBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /weights/init`: the trainer listens at `host`, `port` and is rank 0."""

    session: Name
    backend: Backend
    host: Annotated[str, Meta(min_length=1)]
    port: Port
    world_size: int
    device_uuid: str = ""


class BeginBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /weights/begin`: the tensors of an update, in the order in which they are sent."""

    session: Name
    names: Names
    dtypes: Names
    shapes: Shapes
    version: WeightVersion | None = None
    chunk_bytes: Annotated[int, Meta(ge=0, le=2**34)] = DEFAULT_CHUNK_BYTES
    partial: bool = False
    # Where weights wait in the KV cache or go in place, generation stands from the beginning on.
    policy: PauseMode | None = None
    # Whether the commit will ask for a checksum.
    checksum: bool = False
    cache: CacheMode = "clear"


class CommitBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /weights/commit`."""

    update: Name
    policy: PauseMode
    # true: return the checksum; a string: refuse the update if the checksum differs.
    checksum: bool | str = False


class WeightsAbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /weights/abort`."""

    update: Name
    reason: str = "the trainer aborted it"


class CloseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /weights/close`."""

    session: Name


class AcceptBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /weights/accept`."""


class PauseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /pause`."""

    mode: PauseMode
    lease_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]


class TrlInitBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /init_communicator/`, as TRL's client sends it."""

    host: str
    port: Port
    world_size: int
    client_device_uuid: str = ""


class TrlTensorBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /update_named_param/`, as TRL's client sends it."""

    name: str
    dtype: str
    shape: list[Size]


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/load_lora_adapter`, as vLLM's server takes it, plus a version."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    lora_path: str
    # None: one more than the highest loaded version of this name.
    version: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    # vLLM's clients set it to replace a loaded adapter; this server always replaces it.
    load_inplace: bool = True
    # Adapters of that form are not supported.
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.is_3d_lora_weight:
            raise ValueError(
                "is_3d_lora_weight: expected false, got true; save the adapter in PEFT's form"
            )


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/unload_lora_adapter`, as vLLM's server takes it."""

    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None


PAUSE_BODY = msgspec.json.Decoder(PauseBody)
