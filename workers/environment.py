"""The environment variables of an engine process, set before vLLM is imported.

Settings of vLLM that the user has made stay. What says where a worker runs (GPUs, ports)
is ours, and variables of other distributed launchers go: they would make vLLM join a group
that is not there.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from titopool.settings.config import ServerConfig

# Left by torchrun, accelerate or a trainer that starts the server.
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
)  # fmt: skip


def prepare_environment(environ: MutableMapping[str, str], *, on_cpu: bool) -> None:
    """Sets what vLLM reads at import."""
    if sys.flags.safe_path:
        # Also for the Python processes that vLLM starts by `-m`, to look at a model.
        environ["PYTHONSAFEPATH"] = "1"
    for name in LAUNCHER_VARIABLES:
        environ.pop(name, None)
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # On a CPU, vLLM warns at length of what it lacks there.
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if on_cpu else "WARNING")
    # Standard output is vLLM's default; the supervisor reads both, in order, from one pipe.
    environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if on_cpu:
        environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Engines share the cores with front ends and each other: a thread that spins at the
        # end of each parallel loop takes the core from those it waits for.
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # oneDNN keeps what it has compiled for the last 1,024 shapes, up to 2 MiB each: batches of
        # ever new sizes, as weight updates make them, would add more than a GiB to an engine.
        # Compiling one again takes less than a millisecond.
        environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        # One process less to start: the engine core runs the model itself.
        environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def default_engine_options(
    config: ServerConfig, environ: MutableMapping[str, str], *, on_cpu: bool, seed: int
) -> dict[str, Any]:
    """vLLM engine options, by vLLM's names, where the user gives none."""
    options: dict[str, Any] = {
        "seed": seed,
        # What the policy gradient needs: log-probabilities after temperature and penalties.
        "logprobs_mode": "processed_logprobs",
        # vLLM's own 20 are fewer than TRL's client asks of /get_sequence_logprobs/.
        "max_logprobs": 128,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "worker_extension_cls": "workers.in_model.extension.WorkerExtension",
        "disable_log_stats": True,
        # With vLLM's "auto", what one backend refuses is given to another, but an engine
        # compiles everything with the backend of its first request: vLLM 0.25 dies of it.
        "structured_outputs_config": {"backend": "xgrammar"},
        # Each image's tensors go to the engine with its prompt. vLLM's cache of them takes for
        # granted that what was prepared is also run: a client that leaves in between makes the
        # next request with the same image fail.
        "mm_processor_cache_gb": 0,
        # Nothing but images is taken; room for videos would cost memory.
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        # The engine lets a model think before a grammar guides it.
        "reasoning_parser": config.reasoning_parser,
    }
    if on_cpu:
        # vLLM refuses to start unless this share of the memory is free; the cache itself
        # has the size that VLLM_CPU_KVCACHE_SPACE says.
        options["gpu_memory_utilization"] = 0.5 / max(1, config.num_workers)
        if config.gpus_per_worker == 1:
            options["distributed_executor_backend"] = "uni"
        if not any("enforce-eager" in word for word in config.engine_argv):
            # Compiling takes minutes on a CPU; whoever wants it says --no-enforce-eager.
            options["enforce_eager"] = True
            environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return options


def image_threads(config: ServerConfig) -> int:
    """How many threads of a worker decode and process images."""
    num_cores = len(os.sched_getaffinity(0)) // max(1, config.num_workers)
    return config.image_threads or min(8, max(1, num_cores // 2))


@dataclass(frozen=True)
class Placement:
    """Where one worker runs."""

    variables: dict[str, str]
    # Empty: any core.
    cores: frozenset[int] = frozenset()


def worker_placement(
    index: int, num_workers: int, *, config: ServerConfig, gpus: Sequence[str]
) -> Placement:
    """Worker `index`'s own GPUs, or its own cores where there are none."""
    # vLLM 0.25 chooses a free port and binds it later: engines that start together must
    # not search the same range.
    port = {"VLLM_PORT": str(20_000 + 200 * index)}
    if gpus:
        size = config.gpus_per_worker
        mine = gpus[index * size : (index + 1) * size]
        # The order in which nvidia-smi counts; CUDA's own is by speed.
        order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        own_gpus = {"CUDA_VISIBLE_DEVICES": ",".join(mine), "CUDA_DEVICE_ORDER": order}
        return Placement(port | own_gpus)
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_workers)
    own = frozenset(cores[index * size : (index + 1) * size]) if num_workers > 1 else frozenset()
    # vLLM's own binding puts all of an engine's threads on one core, or several engines on
    # the same one; they inherit the affinity of the worker process instead.
    threads = str(max(1, size // config.gpus_per_worker))
    unless_set = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
    return Placement(port | {k: v for k, v in unless_set.items() if k not in os.environ}, own)
