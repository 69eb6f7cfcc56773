"""A model's memory as one string of bytes, which another process of the same model can take over.

Runs in: vLLM's processes that hold the model. Two processes with the same plan have the same tensors
in the same places of their strings, so bytes need no names. What vLLM keeps where torch cannot read
it, such as weights packed for a CPU's kernels, has no bytes: `opaque_weights` names it.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import msgspec

from titopool.wire.weight_plan import checksum
from workers.in_model.load.copies import held_tensors
from workers.in_model.proof.coverage import packed_for_amx, storage_of

# Attributes of `quant_method` that choose the order of a tensor's elements.
CHOOSES_LAYOUT = re.compile("kernel|experts|backend")
# Attributes that change while the model runs, belong to adapters, or are renewed after a load
# (`renew_sinks`; some exist after the first step only).
SCRATCH = re.compile(r"\.(kv_cache|lora_|punica_|impl\.sinks)|workspace|_buffer\b")


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a block of memory. `dtype` is torch's name; strides and offset are in elements."""

    name: str
    dtype: str
    shape: list[int]
    strides: list[int]
    offset: int


class Block(msgspec.Struct, frozen=True, array_like=True):
    """The memory of one or more tensors, such as tied weights."""

    num_bytes: int
    tensors: list[Tensor]


class Plan(msgspec.Struct, frozen=True):
    """What the bytes mean."""

    blocks: list[Block]
    # Numbers that layers derive from weights, such as scales, and what chooses the order of a tensor's
    # elements where its shape does not show it, by name.
    numbers: dict[str, float | str]
    kinds: dict[str, float | str]

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.blocks)

    def difference(self, other: "Plan") -> str:
        """The first difference to `other` in words; "" if there is none."""
        for mine, its in zip(self.blocks, other.blocks, strict=False):
            if mine != its:
                return f"expected {_shown(mine)}, got {_shown(its)}"
        if len(self.blocks) != len(other.blocks):
            return f"expected {len(self.blocks)} blocks of memory, got {len(other.blocks)}"
        values, its_values = self.numbers | self.kinds, other.numbers | other.kinds
        for name in sorted(values.keys() | its_values.keys()):
            value, its_value = values.get(name), its_values.get(name)
            # NaN is not equal to itself.
            if repr(value) != repr(its_value):
                return f"expected {name} = {value}, got {its_value}"
        return ""


class ModelBytes:
    """The bytes of all parameters and buffers, and of the tensors that vLLM derives from them."""

    def __init__(self, model: Any):
        import torch

        blocks: dict[int, tuple[Any, list[Tensor]]] = {}
        for name, tensor in _tensors(model):
            storage = tensor.untyped_storage()
            described = Tensor(
                name, str(tensor.dtype), list(tensor.shape), list(tensor.stride()),
                tensor.storage_offset(),
            )  # fmt: skip
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            _, tensors = blocks.setdefault(storage_of(tensor), (flat, []))
            if not tensors:
                flat.set_(storage)
            tensors.append(described)
        self._flats = [flat for flat, _ in blocks.values()]
        self.plan = Plan(
            [Block(flat.numel(), tensors) for flat, tensors in blocks.values()],
            dict(_numbers(model)),
            {"device": _device_name(self._flats[0].device), **dict(_kinds(model))},
        )
        self._begins = [0]
        for flat in self._flats:
            self._begins.append(self._begins[-1] + flat.numel())

    def read(self, begin: int, into: Any) -> None:
        """Copies the bytes from `begin` on to `into`, a uint8 tensor of shape (bytes,)."""
        for part, mine in self._parts(begin, into.numel()):
            into[part].copy_(mine, non_blocking=True)

    def write(self, begin: int, data: Any) -> None:
        """Overwrites the bytes from `begin` on with `data`, a buffer of bytes."""
        import torch

        # Some tensors were made in inference mode and may be written in this mode only.
        with torch.inference_mode():
            source = torch.frombuffer(data, dtype=torch.uint8)
            for part, mine in self._parts(begin, source.numel()):
                mine.copy_(source[part])

    def digests(self, is_ending: Callable[[], bool] = bool) -> list[str]:
        """A checksum of each block, up to the one before which `is_ending`."""
        flats = itertools.takewhile(lambda _: not is_ending(), self._flats)
        return [checksum([flat]) for flat in flats]

    def _parts(self, begin: int, num_bytes: int) -> Iterator[tuple[slice, Any]]:
        """The pieces of memory that hold the bytes, each with its place among these bytes."""
        end = begin + num_bytes
        index = bisect.bisect_right(self._begins, begin) - 1
        while index < len(self._flats) and (first := self._begins[index]) < end:
            low, high = max(begin, first), min(end, self._begins[index + 1])
            if low < high:
                yield (
                    slice(low - begin, high - begin),
                    self._flats[index][low - first : high - first],
                )
            index += 1


def opaque_weights(model: Any, *, on_cpu: bool) -> list[str]:
    """Layers whose weights are, also or only, where torch cannot read them."""
    found = packed_for_amx(model)
    for path, module in model.named_modules():
        # A function over weights that were packed for oneDNN, AMX or Zen has these in its closure.
        is_packed = getattr(getattr(module, "cpu_linear", None), "__closure__", None)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        is_emptied = any(
            one is not None and one.is_floating_point() and not one.numel()
            for one in module._parameters.values()
        )
        has_unknown = any(
            one is not None and one.numel() and not storage_of(one)
            for one in (*module._parameters.values(), *module._buffers.values())
        )
        if is_packed or (on_cpu and kernel is not None) or is_emptied or has_unknown:
            found.append(path)
    return found


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor with memory: parameters and buffers, then what is derived from them."""
    known = set[int]()
    for path, module in model.named_modules():
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and tensor.numel() and not SCRATCH.search(f".{name}"):
                known.add(storage_of(tensor))
                yield f"{path}.{name}", tensor
    for name, tensor in held_tensors(model, lambda path: True).items():
        # Integers are indices and flags of a step, or made from the shape.
        is_derived = tensor.is_floating_point() and tensor.numel()
        if is_derived and storage_of(tensor) not in known and not SCRATCH.search(name):
            yield name, tensor


def _numbers(model: Any) -> Iterator[tuple[str, float]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, float):
                yield f"{path}.{name}", value


def _kinds(model: Any) -> Iterator[tuple[str, str]]:
    """The classes and backends of each layer. Kernels want the same weights in different orders."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        parts = [_type_name(one) for one in (module, method, getattr(module, "impl", None))]
        for name, value in sorted(getattr(method, "__dict__", {}).items()):
            if isinstance(value, Enum):
                parts.append(f"{name} {value.name}")
            elif CHOOSES_LAYOUT.search(name):
                parts.append(f"{name} {_type_name(value)}")
        yield f"{path} (kind)", ", ".join(one for one in parts if one)


def _type_name(value: Any) -> str:
    """The name of an object's class, or of a class; text itself; "" for None."""
    if value is None or isinstance(value, str):
        return value or ""
    return (value if isinstance(value, type) else type(value)).__qualname__


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def _shown(block: Block) -> str:
    first = block.tensors[0]
    more = f" and {len(block.tensors) - 1} more" if len(block.tensors) > 1 else ""
    return (
        f"{first.name} ({first.dtype} {first.shape}, strides {first.strides}, offset {first.offset})"
        f"{more} in {block.num_bytes} bytes"
    )
