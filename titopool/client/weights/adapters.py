"""PEFT's models: LoRA adapters merged into what is sent, or written as a folder.

A merged weight is `base + scaling * B @ A` in the base weight's dtype, as PEFT's own `merge_adapter`
computes it. It is made when its turn comes and is a tensor of its own, so the trainer's model never
changes.

Runs in: trainers. peft is imported only if the trainer has imported it.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titopool.client.weights.server_calls import WeightsError

INSTEAD = "send model.merge_and_unload()"


class Merged:
    """A base weight, and the adapters that are added to it when it is sent."""

    def __init__(self, base: Any, deltas: list[tuple[Any, str]]):
        """`deltas`: (layer of PEFT, name of its adapter), in the order in which they are added."""
        self.base = base
        self._deltas = deltas

    def whole(self, gather: Callable[[Any], Any]) -> Any:
        """The merged weight, of the base weight's shape and dtype.

        Args:
            gather: gives the whole values of a parameter, which are valid until this returns.
        """
        import torch

        # `get_delta_weight` reads the adapters' parameters itself.
        factors = {
            id(one): one
            for layer, _ in self._deltas
            for name, one in layer.named_parameters()
            if not name.startswith("base_layer.") and is_zero3(one)
        }
        with torch.no_grad():
            weight = gather(self.base)
            for one in factors.values():
                gather(one)
            for layer, adapter in self._deltas:
                delta = gather(layer.get_delta_weight(adapter)).to(weight.device)
                weight = (weight + delta).to(self.base.dtype)
        return weight


def is_zero3(tensor: Any) -> bool:
    """Whether DeepSpeed has partitioned the parameter; `ds_shape` is its whole shape then."""
    return hasattr(tensor, "ds_id")


def parameters_of(module: Any) -> Iterator[tuple[str, Any]]:
    """A module's parameters by name.

    Of a module with adapters of PEFT: the base model's parameters as the module computes with them,
    under the base model's names. Those that an active adapter changes are `Merged`.

    Raises:
        WeightsError: the adapters are not LoRA, or their sum with the base weights is not defined.
    """
    if "peft" not in sys.modules or not _has_adapters(module):
        yield from module.named_parameters()
        return
    sent: dict[int, Any] = {}
    for name, base, tensor in _adapted(module, ""):
        if id(base) not in sent:
            sent[id(base)] = tensor
            yield name, tensor
        elif sent[id(base)] is not tensor:
            raise WeightsError(
                f"{name}: expected weights that are tied to stay equal, got an adapter of one of "
                "them; target other modules, or train and serve a checkpoint whose head is its own "
                "(saved with tie_word_embeddings=False)"
            )


def _has_adapters(module: Any) -> bool:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(one, PeftModel | BaseTunerLayer) for one in module.modules())


def _adapted(module: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, base weight, what is sent) of all parameters; tied ones more than once."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, PeftModel):
        if module.active_peft_config.is_prompt_learning:
            raise WeightsError(
                f"{prefix or 'model'}: expected LoRA adapters, got "
                f"{module.active_peft_config.peft_type}, which changes no weights"
            )
        module = module.get_base_model()
    if isinstance(module, ModulesToSaveWrapper):
        base = dict(module.original_module.named_parameters())
        for name, parameter in _saved(module).named_parameters():
            yield prefix + name, base.get(name, parameter), parameter
        return
    deltas: dict[str, list[tuple[Any, str]]] = {}
    while isinstance(module, BaseTunerLayer):
        # An adapter of fused experts names its parameter.
        of_parameter = deltas.setdefault(getattr(module, "parameter_name", "weight"), [])
        of_parameter += [(module, adapter) for adapter in _to_merge(module, prefix)]
        module = module.base_layer
    for name, parameter in module.named_parameters(recurse=False):
        added = deltas.pop(name, None)
        if added and not parameter.is_floating_point():
            raise WeightsError(
                f"{prefix}{name}: expected a base weight of a float dtype, got {parameter.dtype}; "
                "save the adapter and call load_lora, or load the model without quantization"
            )
        yield prefix + name, parameter, Merged(parameter, added) if added else parameter
    if any(deltas.values()):
        raise WeightsError(
            f"{prefix}{next(iter(deltas))}: expected it in {type(module).__name__}; {INSTEAD}"
        )
    for name, child in module.named_children():
        yield from _adapted(child, f"{prefix}{name}.")


def _saved(wrapper: Any) -> Any:
    """The module of `modules_to_save` that computes now."""
    if not wrapper.disable_adapters:
        for adapter in wrapper.active_adapters[:1]:
            if adapter in wrapper.modules_to_save:
                return wrapper.modules_to_save[adapter]
    return wrapper.original_module


def _to_merge(layer: Any, prefix: str) -> list[str]:
    """The adapters that a layer adds to its base weight."""
    from peft.tuners.lora import LoraLayer

    if layer.disable_adapters:
        return []
    if not isinstance(layer, LoraLayer):
        raise WeightsError(
            f"{prefix}: expected LoRA adapters, got {type(layer).__module__}."
            f"{type(layer).__name__}; {INSTEAD}"
        )
    found = [one for one in layer.active_adapters if one in layer.scaling]
    for adapter in found:
        if adapter in layer.lora_variant or layer.lora_bias.get(adapter):
            kind = type(layer.lora_variant.get(adapter)).__name__
            raise WeightsError(
                f"{prefix}: expected LoRA without variants and lora_bias, got "
                f"{'lora_bias' if layer.lora_bias.get(adapter) else kind}; {INSTEAD}"
            )
    # The base weight has those that the trainer has merged.
    return [one for one in found if one not in layer.merged_adapters]


def save_lora(model: Any, folder: str) -> str:
    """Writes a model's active adapter; returns the folder, or the adapter's own below it.

    Raises:
        WeightsError: not PEFT's model, its parameters are sharded, or the folder is not empty.
    """
    if "peft" not in sys.modules or not isinstance(model, sys.modules["peft"].PeftModel):
        raise WeightsError(f"model: expected PEFT's PeftModel, got {type(model).__name__}")
    if any(is_zero3(one) or hasattr(one, "full_tensor") for one in model.parameters()):
        raise WeightsError(
            "model: expected whole parameters, got sharded ones; save the adapter as your trainer "
            "does, and call load_lora without model"
        )
    if Path(folder).exists() and any(Path(folder).iterdir()):
        raise WeightsError(
            f"folder: expected a new or an empty folder, got {folder}; a worker that restarts reads "
            "an adapter's folder again, so each version has its own"
        )
    adapter = model.active_adapter
    # Full embeddings are no part of an adapter that vLLM loads.
    model.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False)
    return folder if adapter == "default" else str(Path(folder) / adapter)
