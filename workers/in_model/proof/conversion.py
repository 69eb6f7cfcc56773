"""Parameters of transformers' modules that checkpoints store in another form, e.g. stacked experts.

Runs in: vLLM's processes that hold the model. A trainer sends the parameters of its module; vLLM loads
a checkpoint's tensors. transformers can convert the one to the other: `save_pretrained` does it. Here
the same conversion runs first on tensors without memory, to learn its result, and later on the weights.
"""

import copy
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titopool.wire.commands import TensorInfo

logger = logging.getLogger(__name__)


# eq=False: hashed by identity.
@dataclass(frozen=True, eq=False)
class Conversion:
    """Parameters that are converted together, nearly always a single one, and the result."""

    # Of the module.
    parameters: tuple[TensorInfo, ...]
    # Of a checkpoint.
    tensors: tuple[TensorInfo, ...]
    # Whether the conversion changes the name only.
    renames: bool


class Conversions:
    """How the parameters of one of transformers' models become a checkpoint's tensors."""

    def __init__(self, config: Any, towers: Collection[str] = ()):
        """Has no conversions if transformers has no model for its `config`.

        Args:
            towers: vLLM's modules that hold a `vision_model` and nothing else. Checkpoints name that
                level too; transformers 5 has dropped it from some modules.
        """
        self._towers = tuple(f"{tower}." for tower in towers)
        self._model = _model_without_memory(config)
        self._by_name: dict[str, Conversion] = {}
        # Names of stacked experts, whose checkpoint has the last two dimensions in the other order.
        self._transposed = set[str]()
        self.parameters: list[TensorInfo] = []
        if self._model is not None:
            self._find()

    def transpose_as(self, stored: Iterable[TensorInfo]) -> None:
        """Learns from a checkpoint's tensors which experts it stores transposed (Qwen3-VL-MoE).

        transformers 5 transposes them when it loads, and not when it saves.
        """
        shapes = {info.name: info.shape for info in stored}
        for own in self.parameters:
            swapped = [*own.shape[:-2], *own.shape[:-3:-1]]
            if len(own.shape) == 3 and swapped != own.shape and shapes.get(own.name) == swapped:
                self._transposed.add(own.name)
                tensor = TensorInfo(own.name, own.dtype, swapped)
                self._by_name[own.name] = Conversion((own,), (tensor,), renames=False)

    def of(self, name: str) -> Conversion | None:
        """The conversion of the parameter `name`; None: a checkpoint stores it unchanged."""
        return self._by_name.get(name)

    def checkpoint(self) -> list[TensorInfo]:
        """All tensors of a checkpoint of this model, including persistent buffers."""
        found = [info for info in self.parameters if info.name not in self._by_name]
        for conversion in dict.fromkeys(self._by_name.values()):
            found.extend(conversion.tensors)
        return found

    def convert(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Converts all parameters of a conversion into a checkpoint's tensors, by name."""
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Any] = revert_weight_conversion(self._model, dict(tensors))
        return {
            self._in_tower(name): tensor.mT.contiguous() if name in self._transposed else tensor
            for name, tensor in converted.items()
        }

    def _in_tower(self, name: str) -> str:
        for tower in self._towers:
            if name.startswith(tower) and not name.startswith(f"{tower}vision_model."):
                return f"{tower}vision_model.{name.removeprefix(tower)}"
        return name

    def _find(self) -> None:
        parameters = self._model.state_dict(keep_vars=True)
        together = defaultdict(list)
        for name, parameter in parameters.items():
            self.parameters.append(info_of(name, parameter))
            try:
                converted = self.convert({name: parameter})
            except Exception as error:
                # A trainer must send this parameter in the checkpoint's form.
                logger.warning("%s: transformers cannot convert it: %r", name, error)
                continue
            if converted.get(name) is not parameter:
                # Parameters that end up in the same tensors are converted together.
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

    # For a vision model, AutoModelForCausalLM may build the text part only.
    own = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    for kind in (own, transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        make = getattr(kind, "from_config", None) or getattr(kind, "_from_config", None)
        try:
            with torch.device("meta"):
                # transformers changes the config, which belongs to vLLM.
                return make(copy.deepcopy(config))  # type: ignore[misc]
        except Exception:
            continue
    return None
