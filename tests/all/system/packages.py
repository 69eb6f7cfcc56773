"""Debian packages of the programs that tests need; `make test-all PART=system` installs them as root."""

import os
import shutil
import subprocess
import sys
import time

import pytest

# By program.
PACKAGES = {
    "fish": "fish",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "ip": "iproute2",
    "kubectl": "kubernetes-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "nginx": "nginx-light",
    "zsh": "zsh",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}

# Of an installation, and the pause before the second one.
NUM_ATTEMPTS = 3
PAUSE_S = 10.0


def need(*programs: str) -> None:
    """Skips the test unless all of `programs` are installed."""
    for program in programs:
        if path_of(program) is None:
            pytest.skip(
                f"needs {program}: apt-get install {PACKAGES[program]} (make test-all PART=system)"
            )


def need_root() -> None:
    """Skips the test unless it runs as root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: sudo make test-all PART=system")


def path_of(program: str) -> str | None:
    """Where the program is; Debian has those for administrators in sbin."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def install(by_program: dict[str, str]) -> int:
    """Installs what is missing, as root on Debian; returns the exit code.

    It is 0 also if the mirror does not answer: the skips of the tests name what is missing then.
    """
    missing = sorted({package for name, package in by_program.items() if path_of(name) is None})
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return 0
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    retries = ["-o", "Acquire::Retries=3", "-o", "Acquire::http::Timeout=30"]
    for attempt in range(NUM_ATTEMPTS):
        time.sleep(attempt * PAUSE_S)
        steps = (["apt-get", "update", "-qq", *retries], [*command, *retries])
        codes = [
            subprocess.run(one, env=environ, stdout=subprocess.DEVNULL).returncode for one in steps
        ]
        if codes[-1] == 0:
            return 0
    print(f"not installed, so their tests are skipped: {', '.join(missing)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(install(PACKAGES))
