"""The layout of a weight update's tensors in buckets. One broadcast carries one bucket.

Trainer and workers compute the same layout from the same list of tensors, so the layout is not
sent. Tensors follow each other as bytes in the list's order, each at a multiple of `ALIGNMENT`. A
bucket ends before the tensor that would make it larger than `bucket_bytes`. A larger tensor has a
bucket of its own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titopool.wire.commands import TensorInfo

# Bytes. Enough for a view of any dtype, and for aligned loads on a GPU.
ALIGNMENT = 256
DEFAULT_BUCKET_BYTES = 256 * 2**20
DTYPE_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip
# Odd and large, so that a word at another position changes the sum.
CHECKSUM_FACTOR = 2_654_435_761


@dataclass(frozen=True)
class Piece:
    """Where a tensor is in its bucket, in bytes."""

    tensor: TensorInfo
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """The tensors of one broadcast."""

    num_bytes: int
    pieces: tuple[Piece, ...]


def num_bytes_of(tensor: TensorInfo) -> int:
    """Bytes of the tensor's elements.

    Raises:
        KeyError: the dtype is not in `DTYPE_BYTES`.
    """
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def plan_buckets(tensors: Iterable[TensorInfo], bucket_bytes: int) -> list[Bucket]:
    """The buckets for `tensors`. No bucket is empty."""
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    end = 0
    for tensor in tensors:
        size = num_bytes_of(tensor)
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if pieces and begin + size > bucket_bytes:
            buckets.append(Bucket(end, tuple(pieces)))
            pieces, begin = [], 0
        pieces.append(Piece(tensor, begin, size))
        # An empty tensor takes one byte, because a bucket without bytes cannot be broadcast.
        end = begin + max(size, 1)
    if pieces:
        buckets.append(Bucket(end, tuple(pieces)))
    return buckets


def views_of(buffer: Any, bucket: Bucket) -> list[Any]:
    """Views of a bucket's tensors, in order.

    Args:
        buffer: uint8 of shape (`bucket.num_bytes`,). The views share its memory.
    """
    import torch

    # Views are most of the cost of small tensors, so one view per dtype is sliced.
    flats: dict[str, Any] = {}
    views = []
    for piece in bucket.pieces:
        dtype, shape = piece.tensor.dtype, piece.tensor.shape
        size = DTYPE_BYTES[dtype]
        flat = flats.get(dtype)
        if flat is None:
            whole = bucket.num_bytes - bucket.num_bytes % size
            flat = flats[dtype] = buffer[:whole].view(getattr(torch, dtype))
        begin = piece.begin // size
        views.append(flat[begin : begin + piece.num_bytes // size].view(shape))
    return views


def checksum(tensors: Sequence[Any]) -> str:
    """A checksum of the tensors' bytes, in order: 16 hexadecimal digits, equal on every device.

    The sum modulo 2**64 of all 32-bit words, each times a factor that depends on its position. It
    finds lost, changed and exchanged data. It does not protect against an attacker.
    """
    import torch

    total = 0
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if tail := flat.numel() % 4:
            flat = torch.cat([flat, flat.new_zeros(4 - tail)])
        words = flat.view(torch.int32)
        tensor_sum = 0
        # Chunk by chunk, because the factors take twice the memory of the words.
        for begin in range(0, words.numel(), 2**24):
            chunk = words[begin : begin + 2**24].to(torch.int64)
            positions = torch.arange(begin, begin + chunk.numel(), device=chunk.device)
            tensor_sum += int((chunk * (positions * CHECKSUM_FACTOR + 1)).sum().item())
        total = (total * 31 + tensor_sum + index + 1) % 2**64
    return f"{total:016x}"
