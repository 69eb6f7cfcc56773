"""New weights by vLLM's layerwise reload, with all writes counted so that none is lost.

Runs in: vLLM's processes that hold the model. The reload gives each layer parameters without
memory, buffers the tensors for them, and processes the layer once it is complete. It handles only
writes through a parameter's `weight_loader`: a copy that a model makes by itself (GPT-OSS for
experts and sinks) is lost silently. Here such a copy gives its layer memory at once.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from workers.in_model.proof.coverage import (
    Coverage,
    LoaderGate,
    ModelTensor,
    ModelTensors,
    changed_by,
    finishes_itself,
    refuse_half_loaded,
    result_of,
    watching,
)

# By the checkpoint's names.
Tensors = Iterable[tuple[str, Any]]


def reload(
    model: Any, model_config: Any, tensors: Tensors, coverage: Coverage | None, *, on_cpu: bool
) -> None:
    """Loads a checkpoint's `tensors`.

    Args:
        coverage: what the tensors write according to a dry run; None: unknown.

    Raises:
        HalfLoaded: the load wrote less of the model.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    _name_loaders(model)
    kernels = _take_kernels(model) if on_cpu else {}
    if coverage is not None and coverage.is_confirmed and not coverage.outside_loaders:
        # Counting takes some µs for each operation.
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors))
        finalize_layerwise_reload(model, model_config)
    else:
        watched = _WatchedReload(model)
        initialize_layerwise_reload(model)
        with watched.counting():
            model.load_weights(watched.finishing_layers(tensors))
            watched.finish_layers()
            finalize_layerwise_reload(model, model_config)
        refuse_half_loaded(watched.uncovered(coverage))
        if coverage is not None:
            coverage.is_confirmed = True
    for method, kernel in kernels.items():
        # Layers without new tensors keep their kernels.
        method.moe_kernel = method.moe_kernel or kernel
    if on_cpu:
        _pack_heads(model)


class _WatchedReload:
    """Counts what a reload writes to a model, and completes copies outside loaders."""

    def __init__(self, model: Any):
        self._model = model
        # The memory that the engine computes with, and the tensors that loaders get instead.
        self._kernels = self._loaded = ModelTensors(model)
        self._gate = LoaderGate()
        # Layers written outside loaders that are complete by now.
        self._complete: list[Any] = []
        self._lost = set[str]()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts within the block, which begins after `initialize_layerwise_reload`."""
        self._loaded = ModelTensors(self._model)
        without_memory = [entry for _, entry in self._loaded if entry.tensor.is_meta]
        loaders = self._gate.watching(without_memory, lambda tensor: tensor.weight_loader)
        with loaders, watching(self._handle):
            yield

    def finishing_layers(self, tensors: Tensors) -> Iterator[tuple[str, Any]]:
        """`tensors`; finishes complete layers after each of them."""
        for item in tensors:
            yield item
            self.finish_layers()

    def finish_layers(self) -> None:
        """Copies complete layers into the memory that the engine computes with."""
        from vllm.model_executor.model_loader.reload.layerwise import (
            _layerwise_process,
            get_layerwise_info,
        )

        while self._complete:
            layer = self._complete.pop()
            info = get_layerwise_info(layer)
            if info.can_load():
                _layerwise_process(layer, info)

    def uncovered(self, coverage: Coverage | None) -> list[str]:
        """Parameters of which less was written than `coverage` says, or that were not finished."""
        written = self._loaded.written
        expected = written if coverage is None else coverage.written
        uncovered = {name for name, num in expected.items() if written.get(name, 0) < num}
        paths = {entry.path for _, entry in self._loaded if entry.name in expected}
        filled = self._kernels.written
        for _, entry in self._kernels:
            is_parameter = entry.attribute in entry.layer._parameters
            if not is_parameter or entry.path not in paths or finishes_itself(entry.layer):
                continue
            # A parameter whose weights vLLM packs elsewhere has no elements.
            if filled.get(entry.name, -1) < min(entry.tensor.numel(), entry.num_loadable):
                uncovered.add(entry.name)
        return sorted(uncovered | self._lost)

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed, is_outside_loaders = changed_by(func, args, kwargs), False
        for tensor in changed:
            self._kernels.count_write(tensor)
            entry = self._loaded.of(tensor)
            if entry is None:
                continue
            num_before = self._loaded.num_written(entry)
            self._loaded.count_write(tensor)
            if tensor.is_meta and not self._gate.is_inside:
                is_outside_loaders = True
                self._give_memory(entry, self._loaded.num_written(entry) - num_before)
        if not is_outside_loaders:
            return func(*args, **kwargs)
        from torch.utils._pytree import tree_map

        args, kwargs = tree_map(self._with_memory, (args, kwargs))
        if not any(tensor.is_meta for tensor in changed_by(func, args, kwargs)):
            func(*args, **kwargs)
        return result_of(func, changed)

    def _give_memory(self, entry: ModelTensor, num_new: int) -> None:
        """Gives `entry`'s layer memory; `num_new` more elements are about to be written."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer
        from vllm.model_executor.model_loader.reload.utils import get_layer_size

        layer, info = entry.layer, get_layerwise_info(entry.layer)
        if not info.can_load() or finishes_itself(layer):
            self._lost.add(entry.name)
            return
        if getattr(layer, entry.attribute).is_meta:
            materialize_layer(layer, info)
            for tensor in {**layer._parameters, **layer._buffers}.values():
                if tensor is not None and self._loaded.of(tensor) is None:
                    # Elements that are never written are padding.
                    tensor.data.zero_()
            self._loaded.add(entry.path, layer)
        info.load_numel += num_new
        if info.load_numel >= get_layer_size(layer):
            self._complete.append(layer)

    def _with_memory(self, value: Any) -> Any:
        """`value`, or the same part of the parameter's memory if `value` has none."""
        import torch

        entry = (
            self._loaded.of(value) if isinstance(value, torch.Tensor) and value.is_meta else None
        )
        real = None if entry is None else getattr(entry.layer, entry.attribute)
        if real is None or real.is_meta:
            return value
        return real.data.as_strided(value.size(), value.stride(), value.storage_offset())


def _name_loaders(model: Any) -> None:
    """Gives loaders made by `functools.partial` the name that vLLM's reload asks each loader for.

    MiniMax-M2's norms have such loaders.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        parameters, buffers = get_layerwise_info(layer).restore_metadata
        described = (*parameters.values(), *buffers.values())
        for tensor in (*described, *layer._parameters.values()):
            loader = getattr(tensor, "weight_loader", None)
            if isinstance(loader, functools.partial):
                loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _take_kernels(model: Any) -> dict[Any, Any]:
    """Removes the kernels of experts from their layers; returns them by method.

    vLLM packs experts for a CPU only where a method has no kernel.
    """
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = {one: one.moe_kernel for one in methods if getattr(one, "moe_kernel", None)}
    for method in kernels:
        method.moe_kernel = None
    return kernels


def _pack_heads(model: Any) -> None:
    """Renews the packed copy that a head tied to the embedding has on a CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
