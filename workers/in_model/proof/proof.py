"""Checks an update's tensors against the model before anything changes.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from titopool.wire.commands import TensorInfo
from workers.in_model.checkpoint_files import folder_tensors, values_of
from workers.in_model.proof.catalogue import Catalogue, Fit, catalogue_of, has_rows_of
from workers.in_model.proof.coverage import Coverage
from workers.in_model.proof.dry_runs import DryRuns
from workers.in_model.served_model import ServedModel

TENSORS = msgspec.msgpack.Decoder(list[TensorInfo])


class Proof:
    """How the tensors of the update in progress fit the model, and what they write."""

    def __init__(self, model: ServedModel):
        self._model = model
        self._fit: Fit | None = None
        # What the tensors write; None: unknown.
        self.coverage: Coverage | None = None
        # The last list of tensors, whether it was partial, how it fits and what it writes.
        self._checked: tuple[bytes, bool, Fit, Coverage | None] | None = None

    @property
    def fit(self) -> Fit:
        """How the tensors fit, which were checked before they are loaded."""
        assert self._fit is not None
        return self._fit

    @functools.cached_property
    def catalogue(self) -> Catalogue:
        """The model's tensors."""
        return catalogue_of(self._model.module, self._model.config)

    @functools.cached_property
    def _dry_runs(self) -> DryRuns:
        model = self._model
        return DryRuns(model.module, self.catalogue, is_quantized=model.is_quantized)

    def check(self, tensors: bytes, *, is_partial: bool) -> list[TensorInfo]:
        """Checks names, shapes and dtypes of MessagePack of a list of `TensorInfo`; sets `fit`.

        Raises:
            Refused: a tensor does not fit, one is missing, or a parameter would stay old.
        """
        infos = TENSORS.decode(tensors)
        if self._checked is None or self._checked[:2] != (tensors, is_partial):
            # A trainer sends the same list again and again.
            fit = self.catalogue.fit(infos, is_partial=is_partial)
            coverage = None
            if not fit.split_layers:
                coverage = self._dry_run(infos, fit, is_partial=is_partial)
            self._checked = (tensors, is_partial, fit, coverage)
        *_, self._fit, self.coverage = self._checked
        return infos

    def check_folder(self, folder: Path) -> list[TensorInfo]:
        """As `check`, of a checkpoint's files; compares heads that are tied, too."""
        tensors = folder_tensors(folder)
        self._fit = self.catalogue.fit(tensors, is_partial=False)
        self.coverage = self._dry_run(tensors, self._fit, is_partial=False)
        names = [one.name for one in tensors]
        self.catalogue.check_heads(names, lambda some: values_of(folder, some))
        return tensors

    def compare_heads(self, staged: dict[str, Any]) -> None:
        """Refuses tensors that have come of which a head that is tied has not the embedding's values."""
        module = self._model.module
        self.catalogue.check_heads(
            staged,
            lambda some: [staged[one] for one in some],
            lambda embedding, head: has_rows_of(module, embedding, head),
        )

    def demand(self) -> None:
        """The next update is proved to reach all of the model, too."""
        if self.coverage is not None:
            self.coverage.is_confirmed = False

    def forget(self) -> None:
        """The update has ended."""
        self._fit = self.coverage = None

    def _dry_run(
        self, tensors: Sequence[TensorInfo], fit: Fit, *, is_partial: bool
    ) -> Coverage | None:
        with self._model.loading():
            return self._dry_runs.check(tensors, fit, is_partial=is_partial, is_reload=True)
