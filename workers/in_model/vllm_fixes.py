"""Repairs of vLLM's classes.

Runs in: vLLM's processes that hold the model, from the import of `extension` on.
"""

from typing import Any


def keep_masks_apart() -> None:
    """Keeps a request's `allowed_token_ids` from other requests in the batch.

    In vLLM 0.25.1, a row of the mask that was moved keeps its old content, and a request without
    `allowed_token_ids` that takes the row samples from the ids of another request
    (https://github.com/vllm-project/vllm/issues/43894; 0.32 has a repair of its own). Swapping two
    rows copies one onto the other. Only the runner of mixtures of experts and of CPUs has this batch.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch

    add, swap = InputBatch.add_request, InputBatch.swap_states

    def add_request(self: Any, request: Any) -> int:
        row: int = add(self, request)
        mask = self.allowed_token_ids_mask_cpu_tensor
        if mask is not None and request.req_id not in self.has_allowed_token_ids:
            mask[row].fill_(False)
        return row

    def swap_states(self: Any, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        # Indexing with a list copies the rows.
        swapped = None if mask is None else mask[[i2, i1]]
        swap(self, i1, i2)
        if mask is not None:
            mask[[i1, i2]] = swapped

    InputBatch.add_request, InputBatch.swap_states = add_request, swap_states


def load_below_adapters() -> None:
    """Lets layers that vLLM has wrapped for LoRA load the weights of the layer below.

    vLLM 0.25.1 cannot load the model's weights again when LoRA is enabled: the checkpoint's names
    lack `base_layer`.
    """
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.model_executor.models.utils import AutoWeightsLoader

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return

    def load_weights(self: Any, weights: Any) -> Any:
        load = getattr(self.base_layer, "load_weights", None)
        return load(weights) if load else AutoWeightsLoader(self.base_layer).load_weights(weights)

    BaseLayerWithLoRA.load_weights = load_weights


def route_by_sigmoid_on_cpus() -> None:
    """Lets vLLM's CPU build choose experts by sigmoid scores without groups (MiniMax-M2).

    The router of 0.32 for CPUs asserts softmax there. It has the formula for groups of experts, and
    one group with all experts is the same. Versions without this class or formula keep their router.
    """
    try:
        from vllm.model_executor.layers.fused_moe.router import cpu_router
    except ImportError:
        return
    if not hasattr(cpu_router, "_grouped_topk"):
        return
    router = cpu_router.CPURouter
    route = router._compute_routing

    def compute(self: Any, states: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        is_plain = not self.use_grouped_topk and self.custom_routing_function is None
        if self.scoring_func != "sigmoid" or not is_plain:
            return route(self, states, logits, *args, **kwargs)
        return cpu_router._grouped_topk(
            logits, self.top_k, self.renormalize, 1, 1, "sigmoid", self.routed_scaling_factor,
            self.e_score_correction_bias,
        )  # fmt: skip

    router._compute_routing = compute


def permit_amx_tiles() -> None:
    """Asks Linux for the tile registers of AMX, which vLLM's attention in bfloat16 uses on CPUs.

    vLLM 0.32 looks at the CPU only, and a process that has not asked ends at its first tile with an
    illegal instruction, unless oneDNN asked before it: with a small model it did not. Where Linux
    refuses, vLLM is told that there are no tiles, and takes its vector code.
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        torch.cpu._is_amx_tile_supported = lambda: False
