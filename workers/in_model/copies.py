"""New weights by copies into a model's parameters, which are learnt at the first update.

Runs in: vLLM's processes that hold the model. vLLM's reload (`model_loader/reload`) creates every
layer again and takes 0.1 s for a model of 0.6B parameters; its loaders alone take a fifth of that time,
nearly all of it in Python. Where a layer keeps its weights as a checkpoint has them, the loaders
only copy parts of tensors into parts of parameters. The first update records these copies,
later updates repeat them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from workers.in_model.coverage import Coverage, ModelTensors, changed_by, watching

# Methods and layers that leave their weights as loaded, on a GPU.
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
    """A copy of a part of a tensor into a part of a parameter."""

    target: Any
    name: str
    # Of the part within the tensor, in elements.
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class CopyPlan:
    """The copies that put a checkpoint's tensors into a model."""

    def __init__(self, copies: list[Copy]):
        self._copies = copies
        self._names = {copy.name for copy in copies}

    def fits(self, tensors: Tensors) -> bool:
        """Whether the plan has copies of each of the tensors."""
        return tensors.keys() <= self._names

    def run(self, tensors: Tensors) -> None:
        """Copies `tensors`, which have the shapes and dtypes of those that the plan was learnt from."""
        wanted = [copy for copy in self._copies if copy.name in tensors]
        sources = []
        for copy in wanted:
            tensor = tensors[copy.name]
            offset = tensor.storage_offset() + copy.offset
            sources.append(tensor.as_strided(copy.size, copy.stride, offset))
        import torch

        torch._foreach_copy_([copy.target for copy in wanted], sources)


def learn(model: Any, tensors: Tensors, coverage: Coverage | None) -> CopyPlan | None:
    """As `load_and_learn`; `coverage` is what the tensors should write, if that is known.

    Raises:
        HalfLoaded: the load wrote less of the model.
    """
    entries = ModelTensors(model)

    def count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in changed_by(func, args, kwargs):
            entries.count_write(tensor)
        return func(*args, **kwargs)

    with watching(count):
        plan = load_and_learn(model, tensors)
    if coverage is not None:
        coverage.confirm(entries.written)
    return plan


def load_and_learn(model: Any, tensors: Tensors) -> CopyPlan | None:
    """Loads `tensors` by the model's loaders and records the copies.

    Returns:
        The plan that repeats them with other values; None if the loaders do more than copy.
    """
    recorder = _CopyRecorder(tensors)
    with watching(recorder.handle):
        model.load_weights(iter(tensors.items()))
    return CopyPlan(recorder.copies) if recorder.is_plain else None


class _CopyRecorder:
    """Records the copies that loaders make, as long as they change nothing else."""

    def __init__(self, tensors: Tensors):
        from torch.ops import aten

        self.copies: list[Copy] = []
        self.is_plain = True
        self._copy, self._padding = aten.copy_.default, (aten.fill_.Scalar, aten.zero_.default)
        self._ranges = sorted(
            (one.data_ptr(), one.data_ptr() + one.numel() * one.element_size(), name)
            for name, one in tensors.items()
        )

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries out an operation that changes a tensor."""
        if func is self._copy:
            self._add(args[0], args[1])
        elif func not in self._padding or args[0].numel() == 1:
            # Padding is always the same; a parameter of one number may be filled with a tensor's.
            self.is_plain = False
        return func(*args, **kwargs)

    def _add(self, target: Any, source: Any) -> None:
        begin = source.data_ptr()
        for first, end, name in self._ranges:
            if first <= begin < end:
                offset = (begin - first) // source.element_size()
                size, stride = tuple(source.size()), tuple(source.stride())
                self.copies.append(Copy(target, name, size, stride, offset))
                return
        # The source is computed from a tensor.
        self.is_plain = False
