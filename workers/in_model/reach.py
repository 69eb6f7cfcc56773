"""Which parameters of a model its loaders write tensors to: rehearsed without values, or counted.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps. vLLM's
loaders tell nobody what they have written: some leave out a tensor that they do not know, and
vLLM's reload loses what a model writes past its parameters' loaders. So a list of tensors is
loaded once without values before any of them is taken, and what a real load writes is counted.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titopool.wire.commands import TensorInfo

# An operation of torch that changes tensors: what it is, and its arguments.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# A part of a tensor's memory: offset, sizes and strides, in elements.
Region = tuple[int, tuple[int, ...], tuple[int, ...]]


class HalfLoaded(Exception):
    """A part of the model has the weights before; the message names its parameters."""


class Place(NamedTuple):
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
        """Elements that loading fills: all but padding that the layer declares."""
        return int(getattr(self.tensor, "weight_loader_numel", self.tensor.numel()))


class Places:
    """A model's parameters and buffers by the memory that they lie in, and what was written there."""

    def __init__(self, model: Any):
        self._by_storage: dict[int, Place] = {}
        # Names of those whose memory another one has as well: tied weights.
        self.shared = set[str]()
        self._regions: defaultdict[str, set[Region]] = defaultdict(set)
        self._num_written: defaultdict[str, int] = defaultdict(int)
        for path, layer in model.named_modules():
            self.add(path, layer)

    def add(self, path: str, layer: Any) -> None:
        """Adds what `layer` itself has."""
        from torch.nn.parameter import is_lazy

        for attribute, tensor in {**layer._parameters, **layer._buffers}.items():
            if tensor is not None and not is_lazy(tensor) and storage_of(tensor):
                place = Place(layer, path, attribute, tensor)
                first = self._by_storage.setdefault(storage_of(tensor), place)
                if first.name != place.name:
                    self.shared.add(place.name)

    def __iter__(self) -> Iterator[tuple[int, Place]]:
        return iter(self._by_storage.items())

    def of(self, tensor: Any) -> Place | None:
        """The place that `tensor` is a part of."""
        return self._by_storage.get(storage_of(tensor))

    def note(self, tensor: Any) -> Place | None:
        """`tensor` is written to; returns its place."""
        place = self.of(tensor)
        if place is not None:
            region = (tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))
            regions = self._regions[place.name]
            if region not in regions:
                regions.add(region)
                self._num_written[place.name] += tensor.numel()
        return place

    def num_written(self, place: Place) -> int:
        """Elements of `place` that were written to, at most all that loading fills."""
        return min(self._num_written[place.name], place.num_loadable)

    @property
    def written(self) -> dict[str, int]:
        """The same of all, by name; what was not written to is not among them."""
        by_name = {place.name: place for place in self._by_storage.values()}
        return {name: self.num_written(by_name[name]) for name in self._regions}


@dataclass
class Reach:
    """What loading a list of tensors writes, by the names of parameters and buffers."""

    # Elements.
    written: dict[str, int]
    # Elements that loading fills, of parameters; of tied ones, the first's.
    loadable: dict[str, int]
    # Parameters whose layer has no rules of its own, as attention has for its scales.
    ordinary: set[str]
    # Parameters in whose layer something is written.
    touched: set[str]
    # Ordinary ones of these, which a reload makes anew.
    remade: set[str]
    # Written by the model itself, not by the parameter's loader.
    past_loaders: set[str] = field(default_factory=set)
    # Written in a way that a reload cannot follow.
    lost: set[str] = field(default_factory=set)
    # Whether a real load was seen to write all of it.
    is_proven: bool = False

    def missed(
        self, usual: Callable[[], Mapping[str, int]], *, is_whole: bool, has_all: bool = False
    ) -> list[str]:
        """Parameters that would be left old, or half filled.

        Args:
            usual: what the model's own checkpoint writes.
            is_whole: whether all of the model should be written.
            has_all: whether a checkpoint has all parameters; else there are some that none has.
        """
        wanted = self.loadable if is_whole else self.touched
        short = [name for name in wanted if self.written.get(name, 0) < self.loadable[name]]
        if short:
            best = usual()
            # What is made anew and not written would hold anything.
            needed = self.ordinary if is_whole and has_all else self.remade
            short = [
                name
                for name in short
                if self.written.get(name, 0) < best.get(name, 0)
                or (name in needed and not self.written.get(name))
            ]
        return sorted({*short, *self.lost})


class LoaderGate:
    """Tells what parameters' loaders write from what a model writes past them."""

    def __init__(self) -> None:
        self._depth = 0

    @property
    def is_inside(self) -> bool:
        """Whether a loader is at work."""
        return self._depth > 0

    def through(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """`loader`, watched."""

        # vLLM knows its own wrappers by name, and unwraps them.
        @functools.wraps(loader)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return loader(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    @contextmanager
    def watching(self, places: Iterable[Place], loader_of: Callable[[Any], Any]) -> Iterator[None]:
        """Within the block, the loaders of `places` go through this gate."""
        # These tensors are vLLM's description of the layer: they are as they were afterwards.
        saved = [(place.tensor, dict(place.tensor.__dict__)) for place in places]
        for tensor, _ in saved:
            tensor.weight_loader = self.through(loader_of(tensor))
        try:
            yield
        finally:
            for tensor, attributes in saved:
                tensor.__dict__.clear()
                tensor.__dict__.update(attributes)


def refuse_half_loaded(names: list[str]) -> None:
    """Raises HalfLoaded if there are `names` of parameters that were not written as they should."""
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise HalfLoaded(
            f"{len(names)} of the model's parameters were not written by the tensors that came for "
            f"them: {shown}; start the server with a folder of the new weights instead"
        )


def storage_of(tensor: Any) -> int:
    """What tensors that share memory have in common as long as one is there; 0: it cannot be known."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        # One that is made of others, as some quantized ones are.
        return 0


def watching(handle: Handler, *, all_operations: bool = False) -> Any:
    """Within the block, `handle` is to carry out the operations that change tensors, or all."""
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
    """What an operation on `changed` returns that is not carried out."""
    num_results = len(func._schema.returns)
    if num_results < 2:
        return changed[0] if num_results else None
    return tuple(changed[:num_results])


def finishes_itself(layer: Any) -> bool:
    """Whether vLLM finishes `layer` after all others, with rules of its own: attention."""
    return hasattr(layer, "process_weights_after_loading")


def rehearse(model: Any, tensors: Iterable[TensorInfo], *, is_reload: bool) -> Reach:
    """What loading `tensors`, a checkpoint's, would write; the model stays as it is.

    Args:
        is_reload: whether vLLM's layerwise reload will load them, not the model's loaders alone.

    Raises:
        Exception: a loader does more with tensors than to move them about.
    """
    import torch

    past_loaders, lost, gate = set[str](), set[str](), LoaderGate()
    shared = Places(model).shared
    with as_it_is(model):
        if is_reload:
            enter_load_layout(model)
        places = Places(model)
        ours = {place.name: place for _, place in places if place.tensor.is_meta}

        def write_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "device" in kwargs and _has_none(args):
                # What is moved to a GPU has no more values there.
                kwargs = kwargs | {"device": torch.device("meta")}
            changed = changed_by(func, args, kwargs)
            found = [places.note(tensor) for tensor in changed]
            # A parameter that is made amid loading has memory.
            is_filled = _has_none(args) and not _has_none(changed)
            if not any(found) and not (changed and is_filled):
                return func(*args, **kwargs)
            if not gate.is_inside:
                past_loaders.update(one.name for one in found if one and one.name in ours)
            return result_of(func, changed)

        # A reload leaves its own loaders at parameters with memory of layers that got nothing.
        gated = [
            place
            for _, place in places
            if place.tensor.is_meta or _is_reloads(getattr(place.tensor, "weight_loader", None))
        ]
        watch = watching(write_nothing, all_operations=True)
        with gate.watching(gated, _original_loader), watch:
            model.load_weights(
                (one.name, torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta"))
                for one in tensors
            )
        # A parameter that was given other memory has gone where nobody looks.
        lost |= {place.name for key, place in places if storage_of(place.tensor) != key}
        lost |= {name for name in past_loaders if finishes_itself(ours[name].layer)}
        return _reach_of(places, shared, past_loaders, lost)


def _has_none(values: Iterable[Any]) -> bool:
    """Whether one of the values is a tensor without memory."""
    return any(getattr(value, "is_meta", False) for value in values)


def _reach_of(places: Places, shared: set[str], past_loaders: set[str], lost: set[str]) -> Reach:
    written = places.written
    paths = {place.path for _, place in places if place.name in written}
    parameters = [
        place
        for _, place in places
        if place.attribute in place.layer._parameters and place.name not in shared
    ]
    ordinary = {place.name for place in parameters if not finishes_itself(place.layer)}
    touched = {place.name for place in parameters if place.path in paths}
    # vLLM keeps the others as they are.
    anew = {place.name for place in parameters if place.tensor.is_meta}
    return Reach(
        written,
        {place.name: place.num_loadable for place in parameters},
        ordinary,
        touched,
        ordinary & touched & anew,
        past_loaders,
        lost,
    )


def _original_loader(tensor: Any) -> Any:
    """The loader of a parameter without what vLLM's reload puts around it."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader = getattr(tensor, "weight_loader", default_weight_loader)
    while _is_reloads(loader):
        loader = loader.__wrapped__
    return loader


def _is_reloads(loader: Any) -> bool:
    """Whether it is what vLLM's reload puts around a parameter's loader."""
    return getattr(loader, "__name__", "") == "online_process_loader"


@contextmanager
def as_it_is(model: Any) -> Iterator[None]:
    """Whatever a block does to a model's modules is undone behind it; not what it writes."""
    layers = list(model.modules())
    saved = [(dict(one.__dict__), _contents_of(one)) for one in layers]
    memory = [(one, one.data) for one in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for layer, (attributes, contents) in zip(layers, saved, strict=True):
            layer.__dict__.clear()
            layer.__dict__.update(attributes)
            for collection, kept in zip(_collections_of(layer), contents, strict=True):
                collection.clear()
                collection.update(kept)
        for tensor, data in memory:
            if storage_of(tensor) != storage_of(data):
                tensor.data = data


def _collections_of(layer: Any) -> list[Any]:
    return [layer._parameters, layer._buffers, layer._modules, layer._non_persistent_buffers_set]


def _contents_of(layer: Any) -> list[Any]:
    return [one.copy() for one in _collections_of(layer)]


def enter_load_layout(model: Any) -> None:
    """Gives layers the parameters that loaders know, without memory; see `as_it_is`."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    # It would load layer by layer by itself.
    model._do_torchao_reload = False
    for layer in model.modules():
        restore_layer_on_meta(layer, get_layerwise_info(layer))
