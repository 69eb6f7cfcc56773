"""The GPUs that this process may use, found without importing torch."""

import os
import subprocess

from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig

# Workers on a host without a GPU, however few cores it has.
LEAST_ON_CPUS = 8


def visible_gpus() -> list[str]:
    """GPU ids for CUDA_VISIBLE_DEVICES: its present ones, or all GPUs of the host if it is unset."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listing.stdout.split() if listing.returncode == 0 else []


def number_of_workers(config: ServerConfig) -> int:
    """`num_workers`; if it is 0, as many workers as the GPUs allow, or one without a GPU.

    Raises:
        ConfigError: the workers need more GPUs than are visible.
    """
    num_gpus, size = len(visible_gpus()), config.gpus_per_worker
    if num_gpus == 0:
        return config.num_workers or 1
    num_workers = config.num_workers or max(1, num_gpus // size)
    most = max(num_workers, config.max_workers)
    if most * size > num_gpus:
        raise ConfigError(
            f"num_workers: {most} workers of {size} GPUs each need {most * size} "
            f"GPUs, but {num_gpus} are visible; lower num_workers or tensor_parallel_size"
        )
    return num_workers


def most_workers(config: ServerConfig) -> int:
    """How many workers this host has GPUs for; without a GPU, one for each core, or a few."""
    num_gpus = len(visible_gpus())
    if num_gpus:
        return num_gpus // config.gpus_per_worker
    return max(LEAST_ON_CPUS, len(os.sched_getaffinity(0)))
