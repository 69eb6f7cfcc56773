"""Imports vLLM, once the environment that it reads then is set."""

import os
from typing import Any

from titopool.collector import without_collector
from titopool.settings.config import ServerConfig
from workers.engine.start.exact import choose_kernels
from workers.engine.start.raw_logprobs import choose_runner
from workers.environment import default_engine_options, prepare_environment
from workers.vllm_internals import check_internals


def import_vllm(config: ServerConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Imports all of vLLM that a worker uses; returns the defaults of vLLM's engine options.

    Raises:
        ConfigError: a variable of the user's contradicts a setting, or this vLLM lacks what titopool
            uses of it.
    """
    prepare_environment(os.environ, on_cpu=on_cpu)
    if config.exact:
        choose_kernels(os.environ, on_cpu=on_cpu)
    if config.raw_logprobs:
        choose_runner(os.environ)
    # A restarted worker, or another one, must not repeat this worker's samples.
    seed = int.from_bytes(os.urandom(4), "little") >> 1
    defaults = default_engine_options(config, os.environ, on_cpu=on_cpu, seed=seed)
    with without_collector():
        import vllm.v1.engine.async_llm  # noqa: F401

        check_internals()
    return defaults


def kinds_of_gpus() -> set[str]:
    """The names of the visible GPUs, by NVML: asking CUDA would begin it. vLLM has been imported."""
    from vllm.platforms import current_platform

    return {current_platform.get_device_name(i) for i in range(current_platform.device_count())}
