"""`--exact`: kernels whose results do not depend on the batch, and an output head in float32.

vLLM's batch-invariant mode (https://docs.vllm.ai/en/latest/features/batch_invariance/) fixes the order
of each reduction, so that a prompt gives the same bits alone and beside others. The head's dtype is
vLLM's `head_dtype`: trainers compute logits in float32.
"""

from collections.abc import MutableMapping
from typing import Any

from titopool.errors import ConfigError

VARIABLE = "VLLM_BATCH_INVARIANT"
# NVIDIA's compute capability, 8.0: Ampere.
MIN_CAPABILITY = 80


def choose_kernels(environ: MutableMapping[str, str], *, on_cpu: bool) -> None:
    """Sets the variable that vLLM reads at its import.

    Raises:
        ConfigError: vLLM has no such kernels for CPUs, or the user's variable turns them off.
    """
    if on_cpu:
        raise ConfigError(
            "exact: expected a GPU, because vLLM's batch-invariant kernels are for GPUs, got a CPU; "
            "leave --exact out, and use --dtype float32 for the smallest gap on a CPU"
        )
    given = environ.setdefault(VARIABLE, "1")
    if given != "1":
        raise ConfigError(f"exact: expected {VARIABLE} unset or 1, got {given!r}; unset it")


def fit_to_exact(engine_args: Any) -> None:
    """Checks the GPU, and computes the logits in float32 unless the user chose another head.

    Raises:
        ConfigError: the GPU lacks the kernels, or an option contradicts them.
    """
    _check_gpu()
    if engine_args.speculative_config:
        raise ConfigError(
            "exact: expected no --speculative-config, because a draft's acceptance changes the "
            "shapes of the reductions; leave one of the two out"
        )
    _compute_logits_in_float32(engine_args)


def _check_gpu() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and not current_platform.has_device_capability(MIN_CAPABILITY):
        raise ConfigError(
            "exact: expected a GPU of compute capability 8.0 or higher for vLLM's batch-invariant "
            f"kernels, got {current_platform.get_device_name()}; leave --exact out"
        )


def _compute_logits_in_float32(engine_args: Any) -> None:
    overrides = engine_args.hf_overrides
    if not callable(overrides):
        engine_args.hf_overrides = {"head_dtype": "float32", **(overrides or {})}
