"""`titopool doctor`: versions, GPUs, NCCL, ports, and the internals of vLLM that a worker needs.

Runs in: a process of its own, which starts no engine. The exit code is 1 if something is missing
that a server on this machine needs. A taken port and refused images are shown only: settings choose another
port, and prompts without images work.
"""

import os
import platform
import socket
import subprocess
import sys

from titopool import __version__
from titopool.settings.config import ServerConfig
from titopool.settings.gpus import visible_gpus
from workers.environment import prepare_environment
from workers.vllm_internals import INTERNALS, SUPPORTED, installed_version, missing, version_of

# TRL's client lets the group of a weight update meet here.
TRL_PORT = 51_216
PACKAGES = ("torch", "transformers", "pyzmq")


def main() -> int:
    """Prints the report; returns the exit code."""
    gpus = visible_gpus()
    prepare_environment(os.environ, on_cpu=not gpus)
    lacks = [*_report_versions(), *_report_gpus(gpus), *_report_internals()]
    _report_ports()
    for lack in lacks:
        print(f"missing: {lack}")
    print("all is well" if not lacks else f"{len(lacks)} missing")
    return 1 if lacks else 0


def _report_versions() -> list[str]:
    print(f"python {platform.python_version()}\ntitopool {__version__}")
    versions = {name: version_of(name) for name in PACKAGES} | {"vllm": installed_version()}
    for name, version in versions.items():
        print(f"{name} {version or 'missing'}")
    how = f"vLLM {SUPPORTED}: pip install 'titopool[gpu]', or 'titopool[cpu]' without a GPU"
    # torch and transformers come with vLLM.
    return (
        [name for name, version in versions.items() if not version] if versions["vllm"] else [how]
    )


def _report_gpus(gpus: list[str]) -> list[str]:
    is_gpu_build = bool(version_of("vllm"))
    if not gpus:
        print(
            f"no GPU: {'GPU build' if is_gpu_build else 'CPU build' if installed_version() else 'no vLLM'}"
        )
        return ["a GPU, or vLLM's CPU build: pip install 'titopool[cpu]'"] if is_gpu_build else []
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,memory.free",
        "--format=csv,noheader",
    ]
    try:
        listing = subprocess.run(
            [*query, "-i", ",".join(gpus)], capture_output=True, text=True, timeout=20
        )
        lines = listing.stdout.splitlines() if listing.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    for line in lines or [f"{gpu}: nvidia-smi does not know it" for gpu in gpus]:
        print(f"GPU {line}")
    print(f"NCCL {_nccl_version() or 'missing'}")
    if _nccl_version():
        return []
    return [
        "NCCL, which comes with vLLM's GPU build: pip install 'titopool[gpu]', or set "
        "CUDA_VISIBLE_DEVICES to nothing to use the CPU"
    ]


def _nccl_version() -> str:
    try:
        import torch

        return ".".join(map(str, torch.cuda.nccl.version()))
    except (ImportError, AttributeError):
        return ""


def _report_internals() -> list[str]:
    if not installed_version():
        return []
    lacks = []
    for row in INTERNALS:
        found = missing(row)
        result = f"missing {', '.join(found)}" if found else "ok"
        print(f"vLLM internals: {row.name} ({row.used_by}: {row.purpose}): {result}")
        if not row.is_for_images:
            lacks += found
    return lacks


def _report_ports() -> None:
    for port, setting in ((ServerConfig().port, "port"), (TRL_PORT, "TRL's group_port")):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                print(f"port {port} is free")
            except OSError as error:
                print(f"port {port} cannot be used ({error.strerror}); choose another {setting}")


if __name__ == "__main__":
    sys.exit(main())
