"""Which of a model's parameters a load writes, and how much of each.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps. vLLM's
loaders do not report what they have written: some skip a tensor that they do not know, and
vLLM's layerwise reload loses what a model writes without its parameters' loaders. So torch's operations
are intercepted during a load, and the elements that each operation writes are counted.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Called with an operation of torch and its arguments; returns the operation's result.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# A part of a tensor's memory: offset, sizes and strides, in elements.
Region = tuple[int, tuple[int, ...], tuple[int, ...]]


class HalfLoaded(Exception):
    """A part of the model still has the old weights; the message names its parameters."""


class ModelTensor(NamedTuple):
    """A parameter or buffer of a layer."""

    layer: Any
    path: str
    attribute: str
    tensor: Any

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def num_loadable(self) -> int:
        """Elements that loading fills: all but the padding that the layer declares."""
        return int(getattr(self.tensor, "weight_loader_numel", self.tensor.numel()))


class ModelTensors:
    """A model's parameters and buffers, found by their memory, with a count of what is written."""

    def __init__(self, model: Any):
        self._by_storage: dict[int, ModelTensor] = {}
        # Names of tied weights, whose memory another parameter has as well.
        self.shared = set[str]()
        self._regions: defaultdict[str, set[Region]] = defaultdict(set)
        self._num_written: defaultdict[str, int] = defaultdict(int)
        for path, layer in model.named_modules():
            self.add(path, layer)

    def add(self, path: str, layer: Any) -> None:
        """Adds the parameters and buffers of `layer`, without those of its submodules."""
        from torch.nn.parameter import is_lazy

        for attribute, tensor in {**layer._parameters, **layer._buffers}.items():
            if tensor is not None and not is_lazy(tensor) and storage_of(tensor):
                entry = ModelTensor(layer, path, attribute, tensor)
                first = self._by_storage.setdefault(storage_of(tensor), entry)
                if first.name != entry.name:
                    self.shared.add(entry.name)

    def __iter__(self) -> Iterator[tuple[int, ModelTensor]]:
        return iter(self._by_storage.items())

    def of(self, tensor: Any) -> ModelTensor | None:
        """The parameter or buffer whose memory `tensor` shares."""
        return self._by_storage.get(storage_of(tensor))

    def count_write(self, tensor: Any) -> ModelTensor | None:
        """Counts a write to `tensor`; returns the parameter or buffer that `tensor` is a part of."""
        entry = self.of(tensor)
        if entry is not None:
            region = (tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))
            regions = self._regions[entry.name]
            if region not in regions:
                regions.add(region)
                self._num_written[entry.name] += tensor.numel()
        return entry

    def num_written(self, entry: ModelTensor) -> int:
        """Elements of `entry` that were written, at most those that loading fills."""
        return min(self._num_written[entry.name], entry.num_loadable)

    @property
    def written(self) -> dict[str, int]:
        """`num_written` by name, of all parameters and buffers that were written."""
        by_name = {entry.name: entry for entry in self._by_storage.values()}
        return {name: self.num_written(by_name[name]) for name in self._regions}


@dataclass
class Coverage:
    """What loading a list of tensors writes, by the names of parameters and buffers."""

    # Elements written.
    written: dict[str, int]
    # Elements of each parameter that loading fills; of tied parameters, the first only.
    loadable: dict[str, int]
    # Parameters of layers that vLLM finishes by its general rules; see `finishes_itself`.
    ordinary: set[str]
    # Parameters of layers in which something is written.
    touched: set[str]
    # Ordinary and touched parameters, which a reload creates anew.
    recreated: set[str]
    # Parameters that the model writes without their `weight_loader`.
    outside_loaders: set[str] = field(default_factory=set)
    # Parameters whose new values a reload would lose.
    lost: set[str] = field(default_factory=set)
    # Whether a real load has written all of `written`.
    is_confirmed: bool = False

    def uncovered(
        self, usual: Callable[[], Mapping[str, int]], *, is_whole: bool, has_all: bool = False
    ) -> list[str]:
        """Parameters that would keep old values, wholly or in part.

        Args:
            usual: returns the elements that the model's own checkpoint writes, by parameter.
            is_whole: whether the whole model must be written.
            has_all: whether a checkpoint has all parameters; else no checkpoint has some of them.
        """
        wanted = self.loadable if is_whole else self.touched
        short = [name for name in wanted if self.written.get(name, 0) < self.loadable[name]]
        if short:
            best = usual()
            # A recreated parameter that nothing writes has arbitrary values.
            needed = self.ordinary if is_whole and has_all else self.recreated
            short = [
                name
                for name in short
                if self.written.get(name, 0) < best.get(name, 0)
                or (name in needed and not self.written.get(name))
            ]
        return sorted({*short, *self.lost})


class LoaderGate:
    """Distinguishes writes within parameters' loaders from writes that a model makes by itself."""

    def __init__(self) -> None:
        self._depth = 0

    @property
    def is_inside(self) -> bool:
        """Whether a loader is running."""
        return self._depth > 0

    def through(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """`loader`, wrapped."""

        # vLLM finds its own wrappers by `__name__` and unwraps them by `__wrapped__`.
        @functools.wraps(loader)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return loader(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    @contextmanager
    def watching(
        self, entries: Iterable[ModelTensor], loader_of: Callable[[Any], Any]
    ) -> Iterator[None]:
        """Within the block, the loaders of `entries` go through this gate."""
        # vLLM keeps these tensors as its description of the layer: restore their attributes.
        saved = [(entry.tensor, dict(entry.tensor.__dict__)) for entry in entries]
        for tensor, _ in saved:
            tensor.weight_loader = self.through(loader_of(tensor))
        try:
            yield
        finally:
            for tensor, attributes in saved:
                tensor.__dict__.clear()
                tensor.__dict__.update(attributes)


def refuse_half_loaded(names: list[str]) -> None:
    """Raises HalfLoaded if `names`, parameters that a load has not written in full, are not empty."""
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise HalfLoaded(
            f"{len(names)} of the model's parameters were not written in full by the update's tensors: "
            f"{shown}; start the server with a folder of the new weights instead"
        )


def storage_of(tensor: Any) -> int:
    """A key that tensors share if they share memory, while one of them exists; 0: unknown."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        # A tensor subclass made of other tensors, as some quantized ones are.
        return 0


def watching(handle: Handler, *, all_operations: bool = False) -> Any:
    """Within the block, `handle` carries out the operations that change tensors, or all operations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            is_handled = all_operations or func._schema.is_mutable
            return handle(func, args, kwargs) if is_handled else func(*args, **kwargs)

    return Mode()


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operation writes to."""
    changed: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        changed += value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in changed if tensor is not None]


def result_of(func: Any, changed: list[Any]) -> Any:
    """The result of an operation on `changed` that was not carried out."""
    num_results = len(func._schema.returns)
    if num_results < 2:
        return changed[0] if num_results else None
    return tuple(changed[:num_results])


def finishes_itself(layer: Any) -> bool:
    """Whether vLLM finishes `layer` after all others by the layer's rules, as it does attention."""
    return hasattr(layer, "process_weights_after_loading")


def copied_sinks(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Copies of attention sinks that a backend made once, in another dtype.

    FlashInfer's backend makes such a copy, and the CPU's for float16. New weights do not reach it.

    Returns:
        For each copy: the attention layer's name, the copy, its parameter (None: not found).
    """
    layers = [
        (path, sinks)
        for path, layer in model.named_modules()
        if (sinks := getattr(getattr(layer, "impl", None), "sinks", None)) is not None
    ]
    entries = ModelTensors(model) if layers else None
    for path, sinks in layers:
        if entries is not None and entries.of(sinks) is None:
            owner = model.get_submodule(path.rpartition(".")[0])
            named = {name: one for name, one in owner._parameters.items() if "sink" in name}
            found = [one for one in named.values() if one is not None and one.shape == sinks.shape]
            yield path, sinks, found[0] if len(found) == 1 else None


def packed_for_amx(model: Any) -> list[str]:
    """Weights that latent attention has packed for AMX and dropped, which no reload can write."""
    return [
        f"{path.removesuffix('.mla_attn.mla_attn')}.kv_b_proj.weight"
        for path, layer in model.named_modules()
        if getattr(layer, "is_amx_bmm_enabled", False)
    ]


def renew_sinks(model: Any) -> None:
    """Writes the parameters' values into the copies, in place for the sake of CUDA graphs."""
    import torch

    # A copy that was made in a step may be written in this mode only.
    with torch.inference_mode():
        for _, sinks, parameter in copied_sinks(model):
            if parameter is not None:
                sinks.copy_(parameter)
