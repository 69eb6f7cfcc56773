"""A trainer's tensors as workers find them in its messages."""

from typing import Any

import torch

from titopool.client.weights.packing import messages_of
from titopool.client.weights.sources import Source
from titopool.wire.weight_plan import Checksum, plan_chunks, views_of

CPU = torch.device("cpu")
Pairs = list[tuple[str, Any]]


def sent(source: Source, chunk_bytes: int, digest: Checksum | None = None) -> Pairs:
    """The tensors that workers find in the messages."""
    messages = messages_of(source, chunk_bytes, CPU, digest)
    found: Pairs = []
    for chunk, message in zip(plan_chunks(source.infos, chunk_bytes), messages, strict=True):
        names = [piece.tensor.name for piece in chunk.pieces]
        found += zip(names, views_of(message.view(torch.uint8), chunk), strict=True)
    return found


def assert_same(found: Pairs, expected: Pairs) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, one), (_, two) in zip(found, expected, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
