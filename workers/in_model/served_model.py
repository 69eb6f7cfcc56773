"""The model that vLLM serves, as updates of its weights see it.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workers.in_model.checkpoint_files import Refused
from workers.in_model.proof.coverage import renew_sinks


class ServedModel:
    """The model of one of vLLM's workers."""

    def __init__(self, worker: Any):
        self._worker = worker
        self.device, self.rank, self.config = worker.device, worker.rank, worker.model_config

    @property
    def module(self) -> Any:
        """torch's module."""
        return self._worker.get_model()

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on a CPU, for which vLLM packs weights into memory of other forms."""
        return bool(self.device.type == "cpu")

    def uuid(self) -> str:
        """The UUID of this process's GPU; "" on a CPU."""
        import torch

        if self.on_cpu:
            return ""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def synchronize(self) -> None:
        """Waits until the GPU is done."""
        import torch

        if not self.on_cpu:
            torch.cuda.synchronize(self.device)

    @property
    def is_quantized(self) -> bool:
        """Whether vLLM converts the checkpoint's weights."""
        return self.config.quantization is not None

    @property
    def moves_experts(self) -> bool:
        """Whether vLLM moves experts between processes."""
        return bool(self._worker.vllm_config.parallel_config.enable_eplb)

    @property
    def kv_caches(self) -> Any:
        """vLLM's KV caches, which no other process reads or writes: options for that are refused."""
        return getattr(self._worker.model_runner, "kv_caches", None) or None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within the block, loaders may write to the model."""
        import torch
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self._worker.vllm_config):
            yield

    def renew_derived(self) -> None:
        """Renews what vLLM derives from weights; waits until the GPU is done."""
        renew_sinks(self.module)
        reset = getattr(self._worker.model_runner, "reset_lora_state", None)
        if reset is not None:
            reset()
        self.synchronize()

    def digests(self) -> dict[str, str]:
        """vLLM's own digests of the parameters; the model must not change meanwhile."""
        compute = getattr(self._worker, "compute_weight_checksums", None)
        if compute is None:
            raise Refused(
                "weight_checker: expected vLLM 0.31 or later, which has digests of parameters, got "
                "an earlier one; ask for the checksum of a commit"
            )
        return dict(compute())
