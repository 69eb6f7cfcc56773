"""Assigns GPUs, cores and ports to workers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig

# Ranges of ports for vLLM's own use, below those that Linux gives to clients (from 32,768 on).
FIRST_PORT, PORTS, NUM_RANGES = 20_000, 200, 61
RANGES_PER_SERVER = 8


@dataclass(frozen=True)
class Resources:
    """What one worker runs on."""

    # Environment variables that limit the worker to its resources.
    variables: dict[str, str]
    # Empty: any core.
    cores: frozenset[int] = frozenset()


def resources_of_worker(
    index: int, num_workers: int, *, config: ServerConfig, gpus: Sequence[str]
) -> Resources:
    """The GPUs of worker `index`, or its share of the cores on a machine without GPUs.

    Raises:
        ConfigError: too few GPUs are left for this worker.
    """
    # vLLM 0.25 chooses a free port and binds it later: engines that start at the same time must
    # not search the same range. Servers on one machine seldom do: process ids follow each other, so
    # each moves the ranges by several.
    number = (RANGES_PER_SERVER * os.getpid() + index) % NUM_RANGES
    port = {"VLLM_PORT": str(FIRST_PORT + PORTS * number)}
    if gpus:
        size = config.gpus_per_worker
        own_gpus = gpus[index * size : (index + 1) * size]
        if len(own_gpus) < size:
            raise ConfigError(
                f"worker {index}: expected {size} GPUs for it besides those of the workers before it, "
                f"got {len(gpus)} in all; start fewer workers"
            )
        # nvidia-smi's numbering; CUDA's default is by speed.
        order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        return Resources(
            port | {"CUDA_VISIBLE_DEVICES": ",".join(own_gpus), "CUDA_DEVICE_ORDER": order}
        )
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_workers)
    # A worker that joins later gets no core of its own.
    own = frozenset(cores[index * size : (index + 1) * size]) if num_workers > 1 else frozenset()
    # vLLM's own binding puts all threads of an engine, or several engines, on the same core. The
    # threads inherit the worker's affinity instead.
    threads = str(max(1, size // config.gpus_per_worker))
    defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
    return Resources(port | {k: v for k, v in defaults.items() if k not in os.environ}, own)
