"""`titopool doctor`: versions, GPUs, NCCL, ports, and the internals of vLLM that a worker needs.

Runs in: a process of its own, which starts no engine. The exit code is 1 if something is missing
that a server on this machine needs. A taken port and refused images are shown only: settings choose
another port, and prompts without images work.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence

from titopool import __version__
from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig
from titopool.settings.gpus import visible_gpus
from titopool.settings.sources import from_command_line
from titopool.wire.sockets import fault_of_listening
from workers.environment import prepare_environment
from workers.preflight import check_network
from workers.vllm_internals import INTERNALS, SUPPORTED, installed_version, missing, version_of

# TRL's client lets the group of a weight update meet here.
TRL_PORT = 51_216
PACKAGES = ("torch", "transformers", "pyzmq")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit code."""
    parser = argparse.ArgumentParser(prog="titopool doctor", description=__doc__)
    parser.add_argument("--endpoints", help="checks the connections to these workers instead")
    parser.add_argument("--curve-key-file", help="their key; default: TITOPOOL_CURVE_KEY_FILE")
    parser.add_argument("--url", help="checks a trainer's connections to this front end")
    options = parser.parse_args(argv)
    if options.endpoints or options.url:
        try:
            return check_network(_network_config(options), options.url)
        except (ConfigError, OSError) as error:
            print(f"titopool: {error}")
            return 2
    gpus = visible_gpus()
    prepare_environment(os.environ, on_cpu=not gpus)
    lacks = [*_report_versions(), *_report_gpus(gpus), *_report_internals()]
    _report_ports()
    for lack in lacks:
        print(f"missing: {lack}")
    print("all is well" if not lacks else f"{len(lacks)} missing")
    return 1 if lacks else 0


def _network_config(options: argparse.Namespace) -> ServerConfig:
    words = ["--endpoints", options.endpoints or ""]
    if options.curve_key_file:
        words += ["--curve-key-file", options.curve_key_file]
    return from_command_line(words)


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
    if not gpus:
        print("no GPU\nNCCL is not used without a GPU: weights come over gloo, or from a folder")
        needs_gpu = bool(version_of("vllm"))
        return ["a GPU, or vLLM's CPU build: pip install 'titopool[cpu]'"] if needs_gpu else []
    lacks = []
    for gpu in gpus:
        line = _describe_gpu(gpu)
        print(f"GPU {line or f'{gpu}: nvidia-smi does not list it'}")
        if not line:
            lacks.append(
                f"GPU {gpu}, which CUDA_VISIBLE_DEVICES names: nvidia-smi shows those here"
            )
    version = _nccl_version()
    print(f"NCCL {version or 'missing'}")
    if not version:
        lacks.append(
            "NCCL, which comes with vLLM's GPU build: pip install 'titopool[gpu]', or set "
            "CUDA_VISIBLE_DEVICES to nothing to use the CPU"
        )
    return lacks


def _describe_gpu(gpu: str) -> str:
    """nvidia-smi's line about a GPU; "" if it has none."""
    query = "--query-gpu=index,name,memory.total,memory.free"
    try:
        listing = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader", "-i", gpu],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listing.stdout.strip() if listing.returncode == 0 else ""


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
    num_ok = 0
    for row in INTERNALS:
        found = missing(row)
        num_ok += not found
        if found:
            used = f"{row.name} ({row.used_by}: {row.purpose})"
            print(f"vLLM internals: {used}: missing {', '.join(found)}")
        if not row.is_for_images:
            lacks += found
    print(f"vLLM internals: {num_ok} of {len(INTERNALS)} ok")
    return lacks


def _report_ports() -> None:
    for port, setting in ((ServerConfig().port, "port"), (TRL_PORT, "TRL's group_port")):
        fault = fault_of_listening("", port)
        print(f"{fault}; choose another {setting}" if fault else f"port {port} is free")


if __name__ == "__main__":
    sys.exit(main())
