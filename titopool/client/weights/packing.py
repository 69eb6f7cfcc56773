"""Packs a trainer's tensors into the messages of `titopool/wire/weight_plan.py`, one at a time.

A tensor is taken from the source, copied into the chunk's buffer and forgotten. So the device holds
the chunk that is filled, the chunks that the caller keeps, and the tensor that is being copied.

Runs in: trainers.
"""

from collections.abc import Iterator
from typing import Any

from titopool.client.weights.sources import Source
from titopool.wire.weight_plan import Checksum, Chunk, message_of, plan_chunks

# Small tensors are copied together, as each copy alone takes longer to start than to run. This many
# bytes of them may wait.
MAX_WAITING_BYTES = 16 * 2**20


def messages_of(
    source: Source, chunk_bytes: int, device: Any, digest: Checksum | None
) -> Iterator[Any]:
    """Yields the tensor to broadcast for each chunk, contiguous on `device`; fills it on demand.

    A tensor that has a chunk of its own is not copied if it is on `device` already. The caller must
    not change a message.

    Args:
        digest: gets each tensor.

    Raises:
        WeightsError: the source's tensors are not those that it announced, or gathering failed.
        Exception: torch failed, for example because of too little memory.
    """
    for chunk in plan_chunks(source.infos, chunk_bytes):
        yield message_of(_filled(chunk, source, device, digest), chunk)
    source.check_end()


def _filled(chunk: Chunk, source: Source, device: Any, digest: Checksum | None) -> Any:
    """The chunk's bytes: uint8 of shape (`chunk.num_bytes`,)."""
    import torch

    if len(chunk.pieces) == 1:
        return _alone(chunk, source, device, digest)
    buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=device)
    copies = _Copies()
    for piece in chunk.pieces:
        with source.next_tensor(piece.tensor) as tensor:
            if digest is not None:
                digest.add(tensor)
            target = buffer[piece.begin : piece.begin + piece.num_bytes]
            copies.add(target, _bytes_of(tensor))
            if not source.outlives:
                copies.run()
    copies.run()
    return buffer


def _alone(chunk: Chunk, source: Source, device: Any, digest: Checksum | None) -> Any:
    with source.next_tensor(chunk.pieces[0].tensor) as tensor:
        if digest is not None:
            digest.add(tensor)
        flat = _bytes_of(tensor).to(device)
        return flat if source.outlives else flat.clone()


def _bytes_of(tensor: Any) -> Any:
    """The tensor's elements as uint8 of shape (bytes,); shares its memory if it is contiguous."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


class _Copies:
    """Copies that wait to be started together."""

    def __init__(self) -> None:
        self._targets: list[Any] = []
        self._sources: list[Any] = []
        self._num_bytes = 0

    def add(self, target: Any, source: Any) -> None:
        if target.numel() == 0:
            return
        self._targets.append(target)
        self._sources.append(source)
        self._num_bytes += target.numel()
        if self._num_bytes > MAX_WAITING_BYTES:
            self.run()

    def run(self) -> None:
        import torch

        if self._targets:
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
        self._targets, self._sources, self._num_bytes = [], [], 0
