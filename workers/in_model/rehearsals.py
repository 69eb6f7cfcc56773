"""Lists of tensors are refused before any is sent when loading them would leave a model half old.

Runs in: vLLM's processes that hold the model, on the model's thread. A rehearsal takes as long as
the model's loaders, so each list has one; a trainer sends the same list again and again.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from titopool.wire.commands import TensorInfo
from workers.in_model.catalogue import NEVER_TRAINED, Catalogue, Fit, Refused, shorten
from workers.in_model.reach import Reach, rehearse
from workers.in_model.sinks import copied_sinks

logger = logging.getLogger(__name__)

MAX_KEPT = 8


class Rehearsals:
    """What lists of tensors write to one model."""

    def __init__(self, model: Any, catalogue: Catalogue, *, is_quantized: bool):
        self._model = model
        self._catalogue = catalogue
        self._is_quantized = is_quantized
        self._kept: dict[tuple[bool, tuple[str, ...]], Reach | None] = {}

    def check(
        self, tensors: Sequence[TensorInfo], fit: Fit, *, is_partial: bool, is_reload: bool
    ) -> Reach | None:
        """What `tensors`, which fit the catalogue as `fit` says, write; None: loading will tell.

        Args:
            is_partial: whether some may be missing.
            is_reload: whether vLLM's layerwise reload will load them, not the model's loaders alone.

        Raises:
            Refused: parameters would stay old, or get a part of what belongs there.
        """
        reach = self._rehearse(list(as_in_checkpoint(tensors, fit)), is_reload=is_reload)
        if reach is None:
            return None

        def usual() -> Mapping[str, int]:
            best = self._rehearse(self._catalogue.tensors, is_reload=is_reload)
            return {} if best is None else best.written

        is_whole = not is_partial or bool(self._catalogue.tensors and not fit.missing)
        # Scales of quantized layers may be in no checkpoint.
        missed = reach.missed(usual, is_whole=is_whole, has_all=not self._is_quantized)
        missed += [
            f"{path} (its sinks)" for path, _, own in copied_sinks(self._model) if own is None
        ]
        if fit.kept:
            missed = [name for name in missed if not name.endswith(NEVER_TRAINED)]
        if missed:
            raise Refused(
                f"{len(missed)} of the model's parameters would keep weights that they have, because "
                f"vLLM cannot load them from these tensors while it runs: {shorten(missed)}; put the "
                "new weights into a folder and start the server with it"
            )
        return reach

    def _rehearse(self, tensors: Sequence[TensorInfo], *, is_reload: bool) -> Reach | None:
        key = (is_reload, tuple(one.name for one in tensors))
        if key not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = self._try(tensors, is_reload=is_reload)
        return self._kept[key]

    def _try(self, tensors: Sequence[TensorInfo], *, is_reload: bool) -> Reach | None:
        try:
            return rehearse(self._model, tensors, is_reload=is_reload)
        except Exception as error:
            logger.warning(
                "what new weights reach cannot be known before they are loaded: %r", error
            )
            return None


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
        # Parameters that are converted together have one conversion.
        if conversion is not None and id(conversion) not in converted:
            converted.add(id(conversion))
            yield from conversion.tensors
