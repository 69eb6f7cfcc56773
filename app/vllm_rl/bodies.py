"""Bodies of vLLM's routes for weights, with the fields of vLLM 0.27 to 0.33.

As vLLM's server does, these routes ignore unknown fields at the top of a body. Unknown fields of
`init_info` and `update_info` are refused: they belong to transfers that this server does not have.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.route.fields import Label, Names, Port, Shapes, WeightVersion
from titopool.wire.commands import PACKED_BYTES, Backend
from titopool.wire.pool_state import CacheMode, PauseMode

ChunkBytes = Annotated[int, Meta(ge=1, le=2**36)]


class InitInfo(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`init_info`: either an address or NCCL's id, and how tensors are packed."""

    rank_offset: Annotated[int, Meta(ge=1, le=2**20)]
    world_size: int
    master_address: Annotated[str, Meta(min_length=1, max_length=253)] | None = None
    master_port: Port | None = None
    # NCCL's id of 128 bytes, in standard base64.
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: ChunkBytes = PACKED_BYTES
    # Has no effect on what is sent.
    packed_num_buffers: int | None = None
    # Not a field of vLLM's: a trainer for the backend gloo says so.
    backend: Backend = "nccl"


class InitEngineBody(msgspec.Struct, kw_only=True):
    """`POST /init_weight_transfer_engine`."""

    init_info: InitInfo


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`update_info` of `POST /update_weights`: tensors in the order in which they are sent."""

    names: Names
    dtype_names: Names
    shapes: Shapes
    # Before vLLM 0.28 these are here, later in `init_info`. None: as `init_info` says.
    packed: bool | None = None
    packed_buffer_size_bytes: ChunkBytes | None = None
    packed_num_buffers: int | None = None


class FinishBody(msgspec.Struct, kw_only=True):
    """`POST /finish_weight_update`."""

    weight_version: Label | None = None


class VersionBody(msgspec.Struct, kw_only=True):
    """`POST /update_weight_version`."""

    new_version: Label


class CheckerBody(msgspec.Struct, kw_only=True):
    """`POST /weight_checker`."""

    action: Literal["checksum", "reset", "compare"]
    # Digests by name, as an earlier `checksum` answered.
    baseline: dict[str, str] | None = None


class AbortRequestsBody(msgspec.Struct, kw_only=True):
    """`POST /abort_requests`; without ids, all requests."""

    request_ids: list[str] | None = None


# Decides between the forms of a body.
OBJECT = msgspec.json.Decoder(dict[str, Any])


class UpdateWeightsBody(msgspec.Struct, kw_only=True):
    """`POST /update_weights`, vLLM's form: tensors that the trainer broadcasts."""

    update_info: UpdateInfo


UPDATE_WEIGHTS_BODY = msgspec.json.Decoder(UpdateWeightsBody)


class FolderBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /update_weights`; `weight_dir` is prime-rl's name for `path`."""

    path: str | None = None
    weight_dir: str | None = None
    version: WeightVersion | None = None
    policy: PauseMode | None = None
    cache: CacheMode = "clear"


FOLDER_BODY = msgspec.json.Decoder(FolderBody)
