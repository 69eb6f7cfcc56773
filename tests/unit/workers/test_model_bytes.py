"""A model's memory as one string of bytes: what it holds, what it compares, what it copies."""

from enum import Enum
from typing import Any

import pytest
import torch

from workers.in_model.peers.model_bytes import ModelBytes, opaque_weights

SLICE = 1000


class Model(torch.nn.Module):
    """Tied, strided and eight-bit tensors, one that a layer derives, a number, and scratch memory."""

    def __init__(self, seed: int, *, scale: float = 0.5):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Linear(32, 64, bias=False)
        self.head = torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.data = torch.randn(64, 32, generator=made)
        self.head.turned = torch.randn(16, 48, generator=made).T
        packed = torch.randn(24, 24, generator=made).to(torch.float8_e4m3fn)
        self.packed = torch.nn.Parameter(packed, requires_grad=False)
        self.register_buffer("short", torch.randn(100, generator=made).to(torch.bfloat16)[10:])
        self.embed.scale = scale
        self.kv_cache = torch.randn(2000, generator=made)
        self.empty = torch.nn.Parameter(torch.empty(0))

    def tensors(self) -> list[Any]:
        return [self.embed.weight, self.head.turned, self.packed.float(), self.short]


class Backend(Enum):
    """Kernels that want rows in different orders."""

    PLAIN = 0
    SWAPPED = 1


class Marlin:
    """Stands for what processes a layer's weights."""

    def __init__(self, backend: Backend = Backend.PLAIN):
        self.chosen = backend


def test_another_order_of_elements_is_a_difference():
    one, other = Model(0), Model(0)
    one.embed.quant_method, other.embed.quant_method = Marlin(), Marlin(Backend.SWAPPED)
    text = ModelBytes(one).plan.difference(ModelBytes(other).plan)
    assert text.endswith("chosen PLAIN, got Linear, Marlin, chosen SWAPPED")


def copy(source: ModelBytes, target: ModelBytes) -> None:
    num_bytes = source.plan.num_bytes
    for begin in range(0, num_bytes, SLICE):
        data = torch.empty(min(SLICE, num_bytes - begin), dtype=torch.uint8)
        source.read(begin, data)
        target.write(begin, bytearray(data.numpy().tobytes()))


def test_all_tensors_are_copied_whatever_their_layout():
    one, other = Model(0), Model(1)
    source, target = ModelBytes(one), ModelBytes(other)
    assert source.plan.difference(target.plan) == ""
    assert source.digests() != target.digests()
    scratch = other.kv_cache.clone()
    copy(source, target)
    assert source.digests() == target.digests()
    for mine, its in zip(one.tensors(), other.tensors(), strict=True):
        assert torch.equal(mine, its)
    assert other.head.weight is other.embed.weight
    # The storage of a slice is whole.
    assert torch.equal(one.short._base, other.short._base)
    assert torch.equal(other.kv_cache, scratch)


def test_bytes_beyond_the_end_are_not_written():
    content = ModelBytes(Model(0))
    before = content.digests()
    content.write(content.plan.num_bytes, bytearray(b"\1" * 8))
    assert content.digests() == before


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda model: setattr(model.embed, "scale", 0.25), "expected embed.scale = 0.5, got 0.25"),
        (lambda model: setattr(model.embed, "quant_method", Marlin()), "got Linear, Marlin"),
        (lambda model: model.register_buffer("more", torch.ones(3)), "got .more"),
        (lambda model: setattr(model.head, "turned", torch.ones(48, 16)), "strides [16, 1]"),
        (lambda model: setattr(model, "short", model.short.float()), "torch.float32"),
    ],
    ids=["number", "kind", "block", "strides", "dtype"],
)
def test_a_difference_is_named(change: Any, expected: str):
    one, other = Model(0), Model(0)
    change(other)
    assert expected in ModelBytes(one).plan.difference(ModelBytes(other).plan)


def test_weights_that_torch_cannot_read_are_named():
    model = Model(0)
    assert opaque_weights(model, on_cpu=True) == [""]
    del model.empty
    assert opaque_weights(model, on_cpu=True) == []
    packed = torch.ones(3)
    model.head.cpu_linear = lambda x: x @ packed
    assert opaque_weights(model, on_cpu=True) == ["head"]
