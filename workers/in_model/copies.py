"""New weights straight into the parameters of a model, by copies that were learnt once.

Runs in: vLLM's processes that hold the model. vLLM's own way (`model_loader/reload`) makes every
layer anew and takes 0.1 s for a model of 0.6B parameters; its loaders alone take a fifth of that,
nearly all of it Python. Where a layer keeps its weights as a checkpoint has them, all that the
loaders do in the end is to copy parts of tensors into parts of parameters. They are watched
at the first update; later ones repeat their copies.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from workers.in_model.reach import Places, Reach, changed_by, refuse_half_loaded, watching

# What a layer may do with its weights after they are loaded, on a GPU: nothing.
PLAIN_METHODS = frozenset(("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"))
PLAIN_LAYERS = frozenset(("Attention", "MMEncoderAttention"))

# By the checkpoint's names.
Tensors = Mapping[str, Any]


def keeps_checkpoints_layout(model: Any, quantization: str | None) -> bool:
    """Whether every layer of a vLLM model on a GPU holds its weights as a checkpoint does."""
    if quantization is not None or next(model.parameters()).device.type != "cuda":
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN_METHODS:
            return False
        changes = hasattr(module, "process_weights_after_loading")
        if changes and type(module).__name__ not in PLAIN_LAYERS:
            return False
    return True


class Copy(NamedTuple):
    """A part of a tensor that goes into a part of a parameter."""

    target: Any
    name: str
    # Within the tensor, in elements.
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class CopyPlan:
    """The copies that put a checkpoint's tensors into a model."""

    def __init__(self, copies: list[Copy]):
        self._copies = copies
        self._names = {copy.name for copy in copies}

    def fits(self, tensors: Tensors) -> bool:
        """Whether it knows what to do with each of them."""
        return tensors.keys() <= self._names

    def run(self, tensors: Tensors) -> None:
        """Copies `tensors`, which have the shapes and types of those it was learnt with."""
        wanted = [copy for copy in self._copies if copy.name in tensors]
        sources = []
        for copy in wanted:
            tensor = tensors[copy.name]
            offset = tensor.storage_offset() + copy.offset
            sources.append(tensor.as_strided(copy.size, copy.stride, offset))
        import torch

        torch._foreach_copy_([copy.target for copy in wanted], sources)


def learn(model: Any, tensors: Tensors, reach: Reach | None) -> CopyPlan | None:
    """As `load_and_learn`; `reach` is what the tensors should write, if that is known.

    Raises:
        HalfLoaded: less of the model was written.
    """
    places = Places(model)

    def count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in changed_by(func, args, kwargs):
            places.note(tensor)
        return func(*args, **kwargs)

    with watching(count):
        plan = load_and_learn(model, tensors)
    if reach is not None:
        written = places.written
        refuse_half_loaded(
            [name for name, num in reach.written.items() if written.get(name, 0) < num]
        )
        reach.is_proven = True
    return plan


def load_and_learn(model: Any, tensors: Tensors) -> CopyPlan | None:
    """Loads `tensors` by the model's own loaders, and watches them.

    Returns:
        How to do the same with other values; None where they do more than copy.
    """
    watch = _Watch(tensors)
    with watch:
        model.load_weights(iter(tensors.items()))
    return CopyPlan(watch.copies) if watch.is_plain else None


class _Watch:
    """The copies that are made within a block, as long as nothing else is changed."""

    def __init__(self, tensors: Tensors):
        self.copies: list[Copy] = []
        self.is_plain = True
        self._ranges = sorted(
            (one.data_ptr(), one.data_ptr() + one.numel() * one.element_size(), name)
            for name, one in tensors.items()
        )

    def __enter__(self) -> None:
        from torch.ops import aten

        padding = (aten.fill_.Scalar, aten.zero_.default)

        def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if func is aten.copy_.default:
                self.add(args[0], args[1])
            elif func not in padding or args[0].numel() == 1:
                # Padding is always the same; a parameter of one number may be filled with a tensor's.
                self.is_plain = False
            return func(*args, **kwargs)

        self._mode = watching(look)
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def add(self, target: Any, source: Any) -> None:
        """A copy of `source`, which may be none of the tensors, into `target`."""
        begin = source.data_ptr()
        for first, end, name in self._ranges:
            if first <= begin < end:
                offset = (begin - first) // source.element_size()
                size, stride = tuple(source.size()), tuple(source.stride())
                self.copies.append(Copy(target, name, size, stride, offset))
                return
        # Of something that was computed from a tensor.
        self.is_plain = False
