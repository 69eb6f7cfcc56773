"""New weights by vLLM's layerwise reload, watched: nothing that a model loads may be lost on the way.

Runs in: vLLM's processes that hold the model. The reload gives each layer parameters without
memory, keeps what comes for them, and makes the layer anew once it is whole. It sees only what goes
through a parameter's `weight_loader`: what a model copies into a parameter by itself (GPT-OSS its
experts and sinks) goes nowhere, without a word. Here such a copy gives its layer memory at once.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from workers.in_model.reach import (
    LoaderGate,
    Place,
    Places,
    Reach,
    changed_by,
    finishes_itself,
    refuse_half_loaded,
    result_of,
    watching,
)

# By the checkpoint's names.
Tensors = Iterable[tuple[str, Any]]


def reload(
    model: Any, model_config: Any, tensors: Tensors, reach: Reach | None, *, on_cpu: bool
) -> None:
    """Loads a checkpoint's `tensors`.

    Args:
        reach: what they write, as was found out before; None: it is not known.

    Raises:
        HalfLoaded: less of the model was written than should be.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    kernels = _take_kernels(model) if on_cpu else {}
    if reach is not None and reach.is_proven and not reach.past_loaders:
        # Watching takes some µs for each operation.
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors))
        finalize_layerwise_reload(model, model_config)
    else:
        arrivals = _Arrivals(model)
        initialize_layerwise_reload(model)
        with arrivals.watched():
            model.load_weights(arrivals.finishing_layers(tensors))
            arrivals.finish_layers()
            finalize_layerwise_reload(model, model_config)
        refuse_half_loaded(arrivals.missed(reach))
        if reach is not None:
            reach.is_proven = True
    for method, kernel in kernels.items():
        # Of a layer of which nothing came.
        method.moe_kernel = method.moe_kernel or kernel
    if on_cpu:
        _pack_heads(model)


class _Arrivals:
    """What is written to a model amid a reload."""

    def __init__(self, model: Any):
        self._model = model
        # The memory that the engine computes with, and what loaders are shown in its place.
        self._kernels = self._loaded = Places(model)
        self._gate = LoaderGate()
        # Layers that a model has written past their loaders, and that are complete by now.
        self._whole: list[Any] = []
        self._lost = set[str]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, which begins behind `initialize_layerwise_reload`, all is seen."""
        self._loaded = Places(self._model)
        shown = [place for _, place in self._loaded if place.tensor.is_meta]
        loaders = self._gate.watching(shown, lambda tensor: tensor.weight_loader)
        with loaders, watching(self._handle):
            yield

    def finishing_layers(self, tensors: Tensors) -> Iterator[tuple[str, Any]]:
        """`tensors`; between two of them, layers that are whole are finished."""
        for item in tensors:
            yield item
            self.finish_layers()

    def finish_layers(self) -> None:
        """Puts layers that are whole into the memory that the engine computes with."""
        from vllm.model_executor.model_loader.reload.layerwise import (
            _layerwise_process,
            get_layerwise_info,
        )

        while self._whole:
            layer = self._whole.pop()
            info = get_layerwise_info(layer)
            if info.can_load():
                _layerwise_process(layer, info)

    def missed(self, reach: Reach | None) -> list[str]:
        """Parameters that have less than they should, as `reach` says, or were not finished."""
        written = self._loaded.written
        expected = written if reach is None else reach.written
        missed = {name for name, num in expected.items() if written.get(name, 0) < num}
        paths = {place.path for _, place in self._loaded if place.name in expected}
        filled = self._kernels.written
        for _, place in self._kernels:
            is_parameter = place.attribute in place.layer._parameters
            if not is_parameter or place.path not in paths or finishes_itself(place.layer):
                continue
            # Where weights are packed elsewhere, a parameter has no elements.
            if filled.get(place.name, -1) < min(place.tensor.numel(), place.num_loadable):
                missed.add(place.name)
        return sorted(missed | self._lost)

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed, is_past_loaders = changed_by(func, args, kwargs), False
        for tensor in changed:
            self._kernels.note(tensor)
            place = self._loaded.of(tensor)
            if place is None:
                continue
            num_before = self._loaded.num_written(place)
            self._loaded.note(tensor)
            if tensor.is_meta and not self._gate.is_inside:
                is_past_loaders = True
                self._make_room(place, self._loaded.num_written(place) - num_before)
        if not is_past_loaders:
            return func(*args, **kwargs)
        from torch.utils._pytree import tree_map

        args, kwargs = tree_map(self._with_memory, (args, kwargs))
        if not any(tensor.is_meta for tensor in changed_by(func, args, kwargs)):
            func(*args, **kwargs)
        return result_of(func, changed)

    def _make_room(self, place: Place, num_new: int) -> None:
        """Gives `place`'s layer memory; `num_new` more of its elements are about to be written."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer
        from vllm.model_executor.model_loader.reload.utils import get_layer_size

        layer, info = place.layer, get_layerwise_info(place.layer)
        if not info.can_load() or finishes_itself(layer):
            self._lost.add(place.name)
            return
        if getattr(layer, place.attribute).is_meta:
            materialize_layer(layer, info)
            for tensor in {**layer._parameters, **layer._buffers}.values():
                if tensor is not None and self._loaded.of(tensor) is None:
                    # What is never written is padding.
                    tensor.data.zero_()
            self._loaded.add(place.path, layer)
        info.load_numel += num_new
        if info.load_numel >= get_layer_size(layer):
            self._whole.append(layer)

    def _with_memory(self, value: Any) -> Any:
        """`value`; for a part of a parameter without memory, the same part of the one that has."""
        import torch

        place = (
            self._loaded.of(value) if isinstance(value, torch.Tensor) and value.is_meta else None
        )
        real = None if place is None else getattr(place.layer, place.attribute)
        if real is None or real.is_meta:
            return value
        return real.data.as_strided(value.size(), value.stride(), value.storage_offset())


def _take_kernels(model: Any) -> dict[Any, Any]:
    """Those of experts, away from their layers, by method: vLLM packs experts for a CPU only where
    there is none yet."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = {one: one.moe_kernel for one in methods if getattr(one, "moe_kernel", None)}
    for method in kernels:
        method.moe_kernel = None
    return kernels


def _pack_heads(model: Any) -> None:
    """A head that shares the embedding's weights has a packed copy of them on a CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
