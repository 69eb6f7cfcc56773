"""Debian packages of the programs that tests need; `make test-system` installs them as root."""

import os
import shutil
import subprocess
import sys

import pytest

# By program.
PACKAGES = {
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "ip": "iproute2",
    "kubectl": "kubernetes-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}


def need(*programs: str) -> None:
    """Skips the test unless all of `programs` are installed."""
    for program in programs:
        if path_of(program) is None:
            pytest.skip(f"needs {program}: apt-get install {PACKAGES[program]} (make test-system)")


def need_root() -> None:
    """Skips the test unless it runs as root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: sudo make test-system")


def path_of(program: str) -> str | None:
    """Where the program is; Debian has those for administrators in sbin."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def main() -> int:
    """Installs what is missing, as root on Debian; returns the exit code."""
    missing = sorted({package for name, package in PACKAGES.items() if path_of(name) is None})
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return 0
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    for attempt in (["apt-get", "update", "-qq"], command):
        code = subprocess.run(attempt, env=environ, stdout=subprocess.DEVNULL).returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
