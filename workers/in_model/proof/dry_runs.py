"""Loads a list of tensors without values, to see before an update which parameters it would write.

Runs in: vLLM's processes that hold the model, on the model's thread. An update that would leave a part
of the model old is refused before its tensors are sent. A dry run takes as long as the model's
loaders, so each list has one: a trainer sends the same list again and again.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from titopool.wire.commands import TensorInfo
from workers.in_model.checkpoint_files import Refused
from workers.in_model.proof.catalogue import NEVER_TRAINED, Catalogue, Fit, shorten
from workers.in_model.proof.coverage import (
    Coverage,
    LoaderGate,
    ModelTensors,
    changed_by,
    copied_sinks,
    finishes_itself,
    packed_for_amx,
    result_of,
    storage_of,
    watching,
)

logger = logging.getLogger(__name__)

MAX_KEPT = 8


class Form(NamedTuple):
    """How a tensor comes. One name may come in several shapes, for which loading differs."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def forms_of(infos: Iterable[TensorInfo]) -> list[Form]:
    """The forms of announced tensors."""
    return [Form(one.name, one.dtype, tuple(one.shape)) for one in infos]


class DryRuns:
    """What lists of tensors write to one model."""

    def __init__(self, model: Any, catalogue: Catalogue, *, is_quantized: bool):
        self._model = model
        self._catalogue = catalogue
        self._is_quantized = is_quantized
        self._kept: dict[tuple[bool, tuple[Form, ...]], Coverage | None] = {}

    def check(
        self, tensors: Sequence[TensorInfo], fit: Fit, *, is_partial: bool, is_reload: bool
    ) -> Coverage | None:
        """What `tensors`, which fit the catalogue as `fit` says, write; None: only loading can show it.

        Args:
            is_partial: whether tensors may be missing.
            is_reload: whether vLLM's layerwise reload will load them, not the model's loaders alone.

        Raises:
            Refused: parameters would keep old values, wholly or in part.
        """
        coverage = self._cached(list(as_in_checkpoint(tensors, fit)), is_reload=is_reload)
        if coverage is None:
            return None

        def usual() -> Mapping[str, int]:
            best = self._cached(self._catalogue.tensors, is_reload=is_reload)
            return {} if best is None else best.written

        is_whole = not is_partial or bool(self._catalogue.tensors and not fit.missing)
        # Scales of quantized layers may be in no checkpoint.
        uncovered = coverage.uncovered(usual, is_whole=is_whole, has_all=not self._is_quantized)
        uncovered += [
            f"{path} (its sinks)" for path, _, own in copied_sinks(self._model) if own is None
        ]
        # A reload of any layer packs them again.
        uncovered += [f"{name} (packed for AMX)" for name in packed_for_amx(self._model)]
        if fit.kept:
            uncovered = [name for name in uncovered if not name.endswith(NEVER_TRAINED)]
        if uncovered:
            raise Refused(
                f"{len(uncovered)} of the model's parameters would keep old values, because vLLM cannot "
                f"load them from these tensors while it runs: {shorten(uncovered)}; put the new weights "
                "into a folder and start the server with it"
            )
        return coverage

    def _cached(self, tensors: Sequence[TensorInfo], *, is_reload: bool) -> Coverage | None:
        key = (is_reload, tuple(forms_of(tensors)))
        if key not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            try:
                self._kept[key] = dry_run(self._model, tensors, is_reload=is_reload)
            except Exception as error:
                logger.warning(
                    "a dry run failed, so only loading can show what is written: %r", error
                )
                self._kept[key] = None
        return self._kept[key]


def as_in_checkpoint(tensors: Sequence[TensorInfo], fit: Fit) -> Iterator[TensorInfo]:
    """The tensors that vLLM's loaders get for `tensors`, which fit as `fit` says."""
    ignored, converted = set(fit.ignored), set[int]()
    for tensor in tensors:
        conversion = fit.conversions.get(tensor.name)
        if tensor.name in ignored:
            continue
        if conversion is None and tensor.name not in fit.splits:
            yield tensor
        for part, num_rows in fit.splits.get(tensor.name, ()):
            yield TensorInfo(part, tensor.dtype, [num_rows, *tensor.shape[1:]])
        # Parameters that are converted together share one conversion.
        if conversion is not None and id(conversion) not in converted:
            converted.add(id(conversion))
            yield from conversion.tensors


def dry_run(model: Any, tensors: Iterable[TensorInfo], *, is_reload: bool) -> Coverage:
    """What loading a checkpoint's `tensors` would write; the model stays unchanged.

    Args:
        is_reload: whether vLLM's layerwise reload will load them, not the model's loaders alone.

    Raises:
        Exception: a loader needs the tensors' values.
    """
    import torch

    outside_loaders, lost, gate = set[str](), set[str](), LoaderGate()
    shared = ModelTensors(model).shared
    with restored_afterwards(model):
        if is_reload:
            enter_load_layout(model)
        entries = ModelTensors(model)
        without_memory = {entry.name: entry for _, entry in entries if entry.tensor.is_meta}

        def write_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "device" in kwargs and _has_meta(args):
                # A copy to a GPU of a tensor without values has no values either.
                kwargs = kwargs | {"device": torch.device("meta")}
            changed = changed_by(func, args, kwargs)
            found = [entries.count_write(tensor) for tensor in changed]
            # A parameter that a loader creates has memory.
            is_filled = _has_meta(args) and not _has_meta(changed)
            if not any(found) and not (changed and is_filled):
                return func(*args, **kwargs)
            if not gate.is_inside:
                outside_loaders.update(
                    one.name for one in found if one and one.name in without_memory
                )
            return result_of(func, changed)

        # After a reload, parameters of layers that got nothing keep the reload's loaders.
        gated = [
            entry
            for _, entry in entries
            if entry.tensor.is_meta or _is_reloads(getattr(entry.tensor, "weight_loader", None))
        ]
        watch = watching(write_nothing, all_operations=True)
        with gate.watching(gated, _original_loader), watch:
            model.load_weights(
                (one.name, torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta"))
                for one in tensors
            )
        # A loader gave the parameter other memory, where writes are not counted.
        lost |= {entry.name for key, entry in entries if storage_of(entry.tensor) != key}
        lost |= {name for name in outside_loaders if finishes_itself(without_memory[name].layer)}
        return _coverage_of(entries, shared, outside_loaders, lost)


def _has_meta(values: Iterable[Any]) -> bool:
    """Whether one of the values is a tensor without memory."""
    return any(getattr(value, "is_meta", False) for value in values)


def _coverage_of(
    entries: ModelTensors, shared: set[str], outside_loaders: set[str], lost: set[str]
) -> Coverage:
    written = entries.written
    paths = {entry.path for _, entry in entries if entry.name in written}
    parameters = [
        entry
        for _, entry in entries
        if entry.attribute in entry.layer._parameters and entry.name not in shared
    ]
    ordinary = {entry.name for entry in parameters if not finishes_itself(entry.layer)}
    touched = {entry.name for entry in parameters if entry.path in paths}
    # vLLM keeps the other parameters.
    without_memory = {entry.name for entry in parameters if entry.tensor.is_meta}
    return Coverage(
        written,
        {entry.name: entry.num_loadable for entry in parameters},
        ordinary,
        touched,
        ordinary & touched & without_memory,
        outside_loaders,
        lost,
    )


def _original_loader(tensor: Any) -> Any:
    """A parameter's loader without the wrappers of vLLM's reload."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader = getattr(tensor, "weight_loader", default_weight_loader)
    while _is_reloads(loader):
        loader = loader.__wrapped__
    return loader


def _is_reloads(loader: Any) -> bool:
    """Whether `loader` is a wrapper that vLLM's reload puts around a parameter's loader."""
    return getattr(loader, "__name__", "") == "online_process_loader"


@contextmanager
def restored_afterwards(model: Any) -> Iterator[None]:
    """Undoes after the block what it does to the model's modules, but not what it writes to memory."""
    layers = list(model.modules())
    saved = [(dict(one.__dict__), [part.copy() for part in _parts_of(one)]) for one in layers]
    memory = [(one, one.data) for one in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for layer, (attributes, contents) in zip(layers, saved, strict=True):
            layer.__dict__.clear()
            layer.__dict__.update(attributes)
            for part, kept in zip(_parts_of(layer), contents, strict=True):
                part.clear()
                part.update(kept)
        for tensor, data in memory:
            if storage_of(tensor) != storage_of(data):
                tensor.data = data


def _parts_of(layer: Any) -> list[Any]:
    return [layer._parameters, layer._buffers, layer._modules, layer._non_persistent_buffers_set]


def enter_load_layout(model: Any) -> None:
    """Gives layers the parameters that loaders know, without memory; see `restored_afterwards`."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    # Otherwise load_weights would reload layer by layer.
    model._do_torchao_reload = False
    for layer in model.modules():
        restore_layer_on_meta(layer, get_layerwise_info(layer))
