"""Parameters that transformers' modules have otherwise than checkpoints: all experts in one tensor.

Runs in: vLLM's process that holds the model. A trainer sends what its module has, vLLM loads what
a checkpoint has. transformers knows the way back, as it goes it in `save_pretrained`; here it is
asked for that way, first for what would come of it, without memory, and later with the weights.
"""

import copy
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titopool.wire.commands import TensorInfo

logger = logging.getLogger(__name__)


# Equal to itself only, so that it can be a key.
@dataclass(frozen=True, eq=False)
class Conversion:
    """What becomes of parameters that belong together; nearly always of a single one."""

    # As the module has them.
    parameters: tuple[TensorInfo, ...]
    # As a checkpoint has them.
    tensors: tuple[TensorInfo, ...]
    # Whether only the name differs.
    renames: bool


class Conversions:
    """How the parameters of one of transformers' models become a checkpoint's tensors."""

    def __init__(self, config: Any):
        """Knows none if transformers has no model for `config`, one of its own configs."""
        self._model = _model_without_memory(config)
        self._by_name: dict[str, Conversion] = {}
        self.parameters: list[TensorInfo] = []
        if self._model is not None:
            self._find()

    def of(self, name: str) -> Conversion | None:
        """The conversion that the parameter `name` is part of; None: a checkpoint has it as it is."""
        return self._by_name.get(name)

    def checkpoint(self) -> list[TensorInfo]:
        """All tensors of a checkpoint of this model, persistent buffers too."""
        found = [info for info in self.parameters if info.name not in self._by_name]
        for conversion in dict.fromkeys(self._by_name.values()):
            found.extend(conversion.tensors)
        return found

    def convert(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint's tensors made of all parameters of a conversion, by name."""
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Any] = revert_weight_conversion(self._model, dict(tensors))
        return converted

    def _find(self) -> None:
        parameters = self._model.state_dict(keep_vars=True)
        together = defaultdict(list)
        for name, parameter in parameters.items():
            self.parameters.append(info_of(name, parameter))
            try:
                converted = self.convert({name: parameter})
            except Exception as error:
                # Only names of a checkpoint will do for this one.
                logger.warning("%s: transformers cannot convert it: %r", name, error)
                continue
            if converted.get(name) is not parameter:
                # What goes into the same tensors is converted at once.
                together[tuple(converted)].append(name)
        for names in together.values():
            given = {name: parameters[name] for name in names}
            try:
                made = self.convert(given)
            except Exception as error:
                logger.warning("%s: transformers cannot convert it: %r", names[0], error)
                continue
            conversion = Conversion(
                tuple(info_of(*item) for item in given.items()),
                tuple(info_of(*item) for item in made.items()),
                renames=len(given) == 1 and next(iter(made.values())) is given[names[0]],
            )
            self._by_name.update(dict.fromkeys(names, conversion))


def info_of(name: str, tensor: Any) -> TensorInfo:
    """Name, dtype and shape of `tensor`."""
    return TensorInfo(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def _model_without_memory(config: Any) -> Any:
    import torch
    import transformers

    # Of models for images, the second one may make the part for text only.
    own = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    for kind in (own, transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        make = getattr(kind, "from_config", None) or getattr(kind, "_from_config", None)
        try:
            with torch.device("meta"):
                # It is written to, and is vLLM's own.
                return make(copy.deepcopy(config))  # type: ignore[misc]
        except Exception:
            continue
    return None
