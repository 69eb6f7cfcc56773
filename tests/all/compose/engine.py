"""The Docker engine of the compose tests: the one that answers, else one of their own.

`make test-all PART=compose` first runs packages.py: as root on Debian it installs Docker where no engine
answers. The tests then start `dockerd` and end it. Its layers stay in ~/.cache, so that the
next run builds only what has changed since.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest

from harness.servers import kill_all, wait_until, wait_until_ended
from tests.all.system import packages

# As on a host with few open files: soft and hard limit of the containers' processes.
NUM_DESCRIPTORS = (1024, 4096)
START_TIMEOUT_S = 60.0
# dockerd gives its containers 15 s.
STOP_TIMEOUT_S = 60.0
# Of another run's engine, which has the same layers.
LOCK_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 120.0
# Images that are older go, or each change of the dependencies would leave 5 GB.
KEPT = "168h"


def answers() -> bool:
    """Whether `docker` reaches an engine."""
    return bool(shutil.which("docker")) and not _docker("version", check=False).returncode


@cache
def compose_command() -> tuple[str, ...]:
    """The compose plug-in if installed, else the older program; empty without either."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if (
            shutil.which(command[0])
            and not subprocess.run(
                [*command, "version"], capture_output=True, timeout=30
            ).returncode
        ):
            return command
    return ()


@contextmanager
def running() -> Iterator[bool]:
    """An engine for the block: the one that answers, or one of its own (True).

    The tests are skipped where there is none.
    """
    if answers():
        yield False
    elif os.geteuid() == 0 and shutil.which("docker") and packages.path_of("dockerd"):
        with _own_engine():
            yield True
    else:
        pytest.skip("no Docker engine answers, and only root with Debian's docker.io can start one")


@contextmanager
def _own_engine() -> Iterator[None]:
    """`dockerd` with its own socket. It changes neither firewall nor routing of this host, so its
    containers reach each other and this host, and nothing else."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = cache_folder / "titopool-docker"
    kept.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="titopool-docker-") as folder,
        (kept / "lock").open("w") as lock,
        pytest.MonkeyPatch.context() as patch,
    ):
        wait_until(lambda: _is_locked(lock.fileno()), LOCK_TIMEOUT_S)
        log = Path(folder) / "log"
        soft, hard = NUM_DESCRIPTORS
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    # The kernel ends it with this process, also when nothing else can.
                    "setpriv", "--pdeathsig", "TERM", "dockerd", "--host", f"unix://{folder}/socket",
                    "--data-root", str(kept / "data"), "--exec-root", f"{folder}/exec",
                    "--pidfile", f"{folder}/pid", "--storage-driver", "overlay2",
                    "--bridge", "none", "--iptables=false", "--ip-forward=false",
                    "--default-ulimit", f"nofile={soft}:{hard}",
                ],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        patch.setenv("DOCKER_HOST", f"unix://{folder}/socket")
        try:
            wait_until(
                lambda: process.poll() is not None or answers(), START_TIMEOUT_S, log.read_text
            )
            if process.poll() is not None:
                pytest.skip(f"dockerd does not start here: {log.read_text()[-600:]}")
            _remove_leftovers()
            yield
        finally:
            _stop(process, folder)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_leftovers() -> None:
    """Removes what a killed run left, and old images."""
    if containers := _docker("ps", "--all", "--quiet").stdout.split():
        _docker("rm", "--force", "--volumes", *containers)
    for kind in ("network", "volume"):
        _docker(kind, "prune", "--force")
    _docker("image", "prune", "--all", "--force", "--filter", f"until={KEPT}")


def _stop(process: subprocess.Popen[bytes], folder: str) -> None:
    """Ends dockerd; fails the test if a process of it is left."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
        wait_until_ended(_processes_of(folder))
    finally:
        process.kill()
        process.wait()
        kill_all(_processes_of(folder))


def _processes_of(folder: str) -> list[psutil.Process]:
    """containerd and its shims, which are no children of dockerd, have sockets in `folder`."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if folder in " ".join(process.info["cmdline"] or ())
    ]


def _docker(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *words], check=check, timeout=COMMAND_TIMEOUT_S, capture_output=True, text=True
    )
