"""Environment variables and default options of vLLM, set before vLLM is imported.

The user's own settings of vLLM have precedence. Variables of other distributed launchers are
removed: with them, vLLM would try to join a process group that does not exist. Clients' keys are
removed too, so that a model's code does not find them.
"""

import os
import sys
from collections.abc import MutableMapping
from typing import Any

from titopool.settings.config import SECRET_VARIABLES, ServerConfig
from titopool.wire.sockets import MAX_IPC_PATH_BYTES

# Set by torchrun, accelerate or a trainer that starts the server.
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
)  # fmt: skip


def prepare_environment(environ: MutableMapping[str, str], *, on_cpu: bool) -> None:
    """Sets the variables that vLLM reads at its import."""
    if sys.flags.safe_path:
        # Also for the processes that vLLM starts with `python -m` to inspect a model.
        environ["PYTHONSAFEPATH"] = "1"
    # With the last one, vLLM's metrics of all workers would be written into one folder.
    for name in (*LAUNCHER_VARIABLES, *SECRET_VARIABLES, "PROMETHEUS_MULTIPROC_DIR"):
        environ.pop(name, None)
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # On CPUs, vLLM logs many warnings about missing GPU features.
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if on_cpu else "WARNING")
    # vLLM's default is standard output. One stream keeps the order of vLLM's and other lines.
    environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if on_cpu:
        environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        # Engines share the cores with front ends and other engines: an OpenMP thread that spins
        # for long while it waits takes the core from the threads that it waits for. One that does
        # not spin at all is woken for each operation, which doubles the time of a small step. 1,000
        # rounds are good alone and beside another engine (docs/operators.md).
        if "OMP_WAIT_POLICY" not in environ:
            environ.setdefault("GOMP_SPINCOUNT", "1000")
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # oneDNN caches compiled kernels for the last 1,024 shapes, up to 2 MiB each. Weight updates
        # produce ever new batch sizes, so the cache would grow beyond 1 GiB per engine. Compiling a
        # kernel again takes less than 1 ms.
        environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        # The engine core runs the model itself: one process less to start.
        environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def default_engine_options(
    config: ServerConfig, environ: MutableMapping[str, str], *, on_cpu: bool, seed: int
) -> dict[str, Any]:
    """Defaults of vLLM's engine options, by vLLM's names; sets variables that belong to them."""
    # The names of vLLM's sockets are UUIDs. Its default is the folder for all users' temporary files.
    if config.run_dir and len(os.fsencode(config.run_dir)) + 37 <= MAX_IPC_PATH_BYTES:
        environ.setdefault("VLLM_RPC_BASE_PATH", config.run_dir)
    options: dict[str, Any] = {
        "seed": seed,
        # Policy gradients need log-probabilities after temperature and penalties.
        "logprobs_mode": "processed_logprobs",
        # TRL's client requests more at /get_sequence_logprobs/ than vLLM's default of 20.
        "max_logprobs": 128,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "worker_extension_cls": "workers.in_model.extension.WorkerExtension",
        "disable_log_stats": True,
        # With "auto", vLLM checks a grammar with one backend and may compile it with another, the
        # backend of the engine's first request: vLLM 0.25 dies then.
        "structured_outputs_config": {"backend": "xgrammar"},
        # Only images are accepted; vLLM would reserve memory for videos and audio.
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        # The engine applies a grammar only after the end of the reasoning.
        "reasoning_parser": config.reasoning_parser,
    }
    if on_cpu:
        # vLLM refuses to start unless this share of the memory is free.
        options["gpu_memory_utilization"] = 0.5 / max(1, config.num_workers)
        if not any("kv-cache-memory-bytes" in word for word in config.engine_argv):
            # In GiB. Where it is set, vLLM ignores its option.
            environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if config.gpus_per_worker == 1:
            options["distributed_executor_backend"] = "uni"
        if not any("enforce-eager" in word for word in config.engine_argv):
            # Compiling takes minutes on a CPU; --no-enforce-eager turns it on.
            options["enforce_eager"] = True
            environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return options


def image_processes(config: ServerConfig) -> int:
    """The number of processes that decode and preprocess images for a worker."""
    num_cores = len(os.sched_getaffinity(0)) // max(1, config.num_workers)
    return config.image_processes or min(8, max(1, num_cores // 2))
