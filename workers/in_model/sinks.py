"""Attention sinks of which an attention backend has a copy of its own, in another dtype.

Runs in: vLLM's processes that hold the model. Such a backend (FlashInfer's, the CPU's for float16)
makes the copy once, so that new weights would not reach it.
"""

from collections.abc import Iterator
from typing import Any

from workers.in_model.reach import Places


def copied_sinks(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each copy: the name of the attention layer, the copy, and its parameter; None: not found."""
    layers = [
        (path, sinks)
        for path, layer in model.named_modules()
        if (sinks := getattr(getattr(layer, "impl", None), "sinks", None)) is not None
    ]
    places = Places(model) if layers else None
    for path, sinks in layers:
        if places is not None and places.of(sinks) is None:
            owner = model.get_submodule(path.rpartition(".")[0])
            named = {name: one for name, one in owner._parameters.items() if "sink" in name}
            found = [one for one in named.values() if one is not None and one.shape == sinks.shape]
            yield path, sinks, found[0] if len(found) == 1 else None


def renew_sinks(model: Any) -> None:
    """Puts what the parameters have into the copies, which CUDA graphs may know."""
    import torch

    # A copy that was made in a step may be written to in this mode only.
    with torch.inference_mode():
        for _, sinks, parameter in copied_sinks(model):
            if parameter is not None:
                sinks.copy_(parameter)
