"""Writes an update's tensors into the model: by learned copies, else by vLLM's reload.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titopool.wire.commands import TensorInfo
from workers.in_model.checkpoint_files import weight_files
from workers.in_model.load.copies import CopyPlan, learn, within_layers
from workers.in_model.load.reload import reload
from workers.in_model.proof.dry_runs import forms_of
from workers.in_model.proof.proof import Proof
from workers.in_model.served_model import ServedModel


class Loader:
    """Loads tensors that fit the model as its proof says. An error leaves old and new weights."""

    def __init__(self, model: ServedModel, proof: Proof):
        self._model, self._proof = model, proof
        self._plan = CopyPlan()

    def extra_bytes(self, infos: Sequence[TensorInfo]) -> int:
        """GPU memory that a reload needs in addition: for a new layer and its converted tensors."""
        if self._model.on_cpu or self._plan.fits(forms_of(infos)):
            return 0
        return 2 * self._proof.catalogue.largest_layer_bytes

    def load(self, tensors: dict[str, Any]) -> int:
        """Loads tensors that have come; returns the number of those that the model takes."""
        import torch

        ignored = set(self._proof.fit.ignored)
        tensors = {name: one for name, one in tensors.items() if name not in ignored}
        if self._plan.fits_tensors(tensors):
            with self._model.loading():
                self._plan.run(tensors)
            return len(tensors)
        # On a CPU, vLLM packs weights into memory that cannot be compared.
        is_plain = not (self._model.on_cpu or self._model.is_quantized)
        if not (is_plain and self._plan.may_learn(tensors)):
            return self._reload(tensors.items())
        coverage = self._proof.coverage
        touched = coverage and coverage.touched
        scope = within_layers(touched) if self._proof.fit.missing and touched else lambda _: True
        with self._model.loading():
            learn(
                self._plan, self._model.module, tensors,
                load=lambda: self._model.module.load_weights(
                    self._as_in_checkpoint(tensors.items(), [])
                ),
                reload=lambda: self._reload(tensors.items()),
                scope=scope,
            )  # fmt: skip
        # Learning takes memory for a layer or two. Later updates take none.
        torch.cuda.empty_cache()
        return len(tensors)

    def load_in_place(self, infos: Sequence[TensorInfo], chunks: Iterable[dict[str, Any]]) -> int:
        """Loads the tensors of each chunk as it comes.

        Args:
            infos: of all chunks.
        """
        ignored = set(self._proof.fit.ignored)
        if not self._plan.fits(forms_of(one for one in infos if one.name not in ignored)):
            return self._reload(itertools.chain.from_iterable(chunk.items() for chunk in chunks))
        num_loaded = 0
        with self._model.loading():
            for chunk in chunks:
                wanted = {name: one for name, one in chunk.items() if name not in ignored}
                self._plan.run(wanted)
                num_loaded += len(wanted)
        return num_loaded

    def load_folder(self, folder: Path) -> int:
        """Loads a checkpoint's files."""
        return self._reload(_tensors_in_folder(folder, self._model.device))

    def forget_copies(self) -> None:
        """The next update learns its copies, and proves them, anew."""
        self._plan = CopyPlan()

    def _reload(self, tensors: Iterable[tuple[str, Any]]) -> int:
        loaded: list[str] = []
        with self._model.loading():
            reload(
                self._model.module, self._model.config, self._as_in_checkpoint(tensors, loaded),
                self._proof.coverage, on_cpu=self._model.on_cpu,
            )  # fmt: skip
        return len(loaded)

    def _as_in_checkpoint(
        self, tensors: Iterable[tuple[str, Any]], loaded: list[str]
    ) -> Iterator[tuple[str, Any]]:
        """`tensors` in the checkpoint's form, without the ignored ones; `loaded` gets their names."""
        fit, conversions = self._proof.fit, self._proof.catalogue.conversions
        ignored = set(fit.ignored)
        # Parameters until the others of their conversion have come.
        waiting: dict[str, Any] = {}
        for name, tensor in tensors:
            if name in ignored:
                continue
            loaded.append(name)
            if conversion := fit.conversions.get(name):
                waiting[name] = tensor
                names = [one.name for one in conversion.parameters]
                if conversions is not None and all(one in waiting for one in names):
                    yield from conversions.convert({one: waiting.pop(one) for one in names}).items()
                continue
            begin = 0
            for part, num_rows in fit.splits.get(name, ()):
                yield part, tensor[begin : begin + num_rows]
                begin += num_rows
            if name not in fit.splits:
                yield name, tensor


def _tensors_in_folder(folder: Path, device: Any) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in weight_files(folder):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
