"""The layout of a weight update's tensors in chunks: vLLM's rule. One broadcast carries one chunk.

Trainer and workers compute the same layout from the same list of tensors, so the layout is not
sent. Tensors follow each other in the list's order as contiguous bytes, without gaps. A chunk ends
after the tensor that makes it larger than `chunk_bytes`. So a chunk is larger than `chunk_bytes` by
up to one tensor. With `chunk_bytes` 0 each tensor is broadcast alone, in its own dtype.

Source: `pack_tensors` and `packed_nccl_broadcast_consumer` in vLLM's
`distributed/weight_transfer/packed_tensor.py`; with 0 the loop of `NCCLWeightTransferEngine`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titopool.wire.commands import TensorInfo

DEFAULT_CHUNK_BYTES = 256 * 2**20
DTYPE_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip
# The dtype of a chunk of packed tensors.
PACKED = "uint8"
# Odd and large, so that a word at another position changes the sum.
CHECKSUM_FACTOR = 2_654_435_761
# Words of a tensor whose factors are in memory at once; these take 24 bytes a word.
CHECKSUM_WORDS = 2**22
# Rows of two tensors that are compared at once.
COMPARED_ROWS = 4096


@dataclass(frozen=True)
class Piece:
    """Where a tensor is in its chunk, in bytes."""

    tensor: TensorInfo
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """The tensors of one broadcast."""

    num_bytes: int
    # Of the broadcast: `PACKED`, or the own dtype of a single tensor.
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def num_copied_bytes(self) -> int:
        """Bytes that `views_of` copies from a buffer that begins at a multiple of 8 bytes."""
        return sum(
            piece.num_bytes
            for piece in self.pieces
            if piece.begin % DTYPE_BYTES[piece.tensor.dtype]
        )


def num_bytes_of(tensor: TensorInfo) -> int:
    """Bytes of the tensor's elements.

    Raises:
        KeyError: the dtype is not in `DTYPE_BYTES`.
    """
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def plan_chunks(tensors: Iterable[TensorInfo], chunk_bytes: int) -> list[Chunk]:
    """The chunks for `tensors`. A chunk has no bytes if all its tensors are empty.

    Raises:
        KeyError: a dtype is not in `DTYPE_BYTES`.
    """
    if chunk_bytes == 0:
        return [_alone(tensor, num_bytes_of(tensor)) for tensor in tensors]
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    end = 0
    for tensor in tensors:
        size = num_bytes_of(tensor)
        pieces.append(Piece(tensor, end, size))
        end += size
        if end > chunk_bytes:
            chunks.append(Chunk(end, PACKED, tuple(pieces)))
            pieces, end = [], 0
    if pieces:
        chunks.append(Chunk(end, PACKED, tuple(pieces)))
    return chunks


def _alone(tensor: TensorInfo, size: int) -> Chunk:
    return Chunk(size, tensor.dtype, (Piece(tensor, 0, size),))


def message_of(buffer: Any, chunk: Chunk) -> Any:
    """The tensor that is broadcast: `buffer` in the chunk's dtype.

    Args:
        buffer: uint8 of shape (`chunk.num_bytes`,), at a multiple of the dtype's item size.
    """
    import torch

    return buffer.view(getattr(torch, chunk.dtype))


def views_of(buffer: Any, chunk: Chunk) -> list[Any]:
    """The tensors in a chunk's buffer, in order.

    Args:
        buffer: uint8 of shape (`chunk.num_bytes`,).

    Returns:
        Views that share the buffer's memory. A tensor that does not begin at a multiple of its item
        size is a copy, because torch has no view of it. So the buffer must be filled before, unless
        `chunk.num_copied_bytes` is 0.
    """
    import torch

    # Views are most of the cost of small tensors, so one view per dtype is sliced.
    flats: dict[str, Any] = {}
    views = []
    offset = buffer.storage_offset()
    for piece in chunk.pieces:
        dtype, shape = piece.tensor.dtype, piece.tensor.shape
        size = DTYPE_BYTES[dtype]
        end = piece.begin + piece.num_bytes
        if (offset + piece.begin) % size:
            copied = buffer[piece.begin : end].clone()
            views.append(copied.view(getattr(torch, dtype)).view(shape))
            continue
        # From the first multiple of the item size on.
        skipped = -offset % size
        flat = flats.get(dtype)
        if flat is None:
            whole = max(0, chunk.num_bytes - skipped) // size * size
            flat = buffer[skipped : skipped + whole].view(getattr(torch, dtype))
            flats[dtype] = flat
        begin = (piece.begin - skipped) // size
        views.append(flat[begin : begin + piece.num_bytes // size].view(shape))
    return views


class Checksum:
    """A checksum of tensors' bytes, in order: 16 hexadecimal digits, equal on every device.

    The sum modulo 2**64 of all 32-bit words, each times a factor that depends on its position. It
    finds lost, changed and exchanged data. It does not protect against an attacker.
    """

    def __init__(self) -> None:
        # For each tensor its sum, on its own device: reading it would wait for the device.
        self._sums: list[Any] = []

    def add(self, tensor: Any) -> None:
        """Adds the next tensor. Its memory may change once the device has run the work so far."""
        import torch

        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        # Part by part, because the factors take more memory than the words.
        for begin in range(0, flat.numel(), 4 * CHECKSUM_WORDS):
            words = _words_of(flat[begin : begin + 4 * CHECKSUM_WORDS])
            first = begin // 4
            positions = torch.arange(first, first + words.numel(), device=words.device)
            total += (words.to(torch.int64) * (positions * CHECKSUM_FACTOR + 1)).sum()
        self._sums.append(total)

    def digest(self) -> str:
        """The checksum of the tensors so far."""
        total = 0
        for index, tensor_sum in enumerate(self._sums):
            total = (total * 31 + int(tensor_sum.item()) + index + 1) % 2**64
        return f"{total:016x}"


def _words_of(flat: Any) -> Any:
    """The int32 words of a uint8 tensor; the last one is filled with zeros."""
    import torch

    if tail := flat.numel() % 4:
        flat = torch.cat([flat, flat.new_zeros(4 - tail)])
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


def checksum(tensors: Sequence[Any]) -> str:
    """The `Checksum` of `tensors`."""
    found = Checksum()
    for tensor in tensors:
        found.add(tensor)
    return found.digest()


def is_same(one: Any, other: Any, *, dtype: Any = None) -> bool:
    """Whether two tensors have the same shape and, exactly, the same values.

    Of one dtype they are compared as bits, so that NaN equals itself; of two, as values of `dtype`
    (None: the one that holds both).
    """
    import torch

    if one.shape != other.shape:
        return False
    common = torch.uint8
    if one.dtype != other.dtype:
        common = dtype or torch.promote_types(one.dtype, other.dtype)

    def form(rows: Any) -> Any:
        rows = rows.to(one.device).contiguous()
        return rows.view(common) if one.dtype == other.dtype else rows.to(common)

    # A comparison takes memory, here of some rows only.
    parts = zip(one.split(COMPARED_ROWS), other.split(COMPARED_ROWS), strict=True)
    return all(torch.equal(form(left), form(right)) for left, right in parts)
