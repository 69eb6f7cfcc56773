"""Which GPUs this process may use, without importing torch."""

import os
import subprocess

from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig


def visible_gpus() -> list[str]:
    """Ids for CUDA_VISIBLE_DEVICES: those that it names now, else all of the host's."""
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
    """`num_workers`, or as many as the GPUs allow, or one on a CPU.

    Raises:
        ConfigError: there are fewer GPUs than the workers need.
    """
    num_gpus, size = len(visible_gpus()), config.gpus_per_worker
    if num_gpus == 0:
        return config.num_workers or 1
    wanted = config.num_workers or max(1, num_gpus // size)
    if wanted * size > num_gpus:
        raise ConfigError(
            f"num_workers: {wanted} workers of {size} GPUs each need {wanted * size}, and "
            f"{num_gpus} are visible; lower num_workers or tensor_parallel_size"
        )
    return wanted
