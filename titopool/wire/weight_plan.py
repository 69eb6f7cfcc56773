"""How the tensors of a weight update lie in the buckets that are broadcast.

Both sides compute the plan from the same list, so nothing of it travels. Tensors follow one
another as bytes, each from a multiple of `ALIGNMENT` on, in the order in which they were
announced; a bucket ends where the next tensor would make it larger than `bucket_bytes`. One that
is larger by itself has a bucket of its own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titopool.wire.commands import TensorInfo

# Bytes; what every dtype's view needs, and the GPU's loads like.
ALIGNMENT = 256
DEFAULT_BUCKET_BYTES = 256 * 2**20
DTYPE_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip
# Odd and large, so that a word that moves changes the sum.
WEIGHT_STEP = 2_654_435_761


@dataclass(frozen=True)
class Piece:
    """A tensor's place in its bucket, in bytes."""

    tensor: TensorInfo
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """What one broadcast carries."""

    num_bytes: int
    pieces: tuple[Piece, ...]


def num_bytes_of(tensor: TensorInfo) -> int:
    """Bytes of the tensor's elements.

    Raises:
        KeyError: its dtype is none of `DTYPE_BYTES`.
    """
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def plan_buckets(tensors: Iterable[TensorInfo], bucket_bytes: int) -> list[Bucket]:
    """The buckets that carry `tensors`; none is empty."""
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
        # An empty tensor still has its place, and a bucket cannot be broadcast without a byte.
        end = begin + max(size, 1)
    if pieces:
        buckets.append(Bucket(end, tuple(pieces)))
    return buckets


def views_of(buffer: Any, bucket: Bucket) -> list[Any]:
    """The tensors in a bucket's `buffer`, uint8 of one dimension, in order; they share its memory."""
    import torch

    # Making views is most of what small tensors cost, so as few as possible are made.
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
    """A digest of the tensors' bytes, in order: 16 hexadecimal digits, the same on every device.

    The sum over all 32-bit words, each times a number that depends on its place, modulo 2**64:
    it tells of lost, changed and exchanged data, not of an attacker.
    """
    import torch

    total = 0
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if tail := flat.numel() % 4:
            flat = torch.cat([flat, flat.new_zeros(4 - tail)])
        words = flat.view(torch.int32)
        part = 0
        # In parts: the factors take twice the words' memory.
        for begin in range(0, words.numel(), 2**24):
            chunk = words[begin : begin + 2**24].to(torch.int64)
            places = torch.arange(begin, begin + chunk.numel(), device=chunk.device)
            part += int((chunk * (places * WEIGHT_STEP + 1)).sum().item())
        total = (total * 31 + part + index + 1) % 2**64
    return f"{total:016x}"
