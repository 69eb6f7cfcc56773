"""Starts a server, waits until it is ready, counts its CPU time and stops it."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.targets import Engine, Target
from harness.servers import free_port
from titopool.settings.config import ServerConfig
from titopool.settings.gpus import visible_gpus
from workers.environment import default_engine_options, prepare_environment
from workers.supervisor.resources import Resources, resources_of_worker

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0


@dataclass
class Running:
    """A server that can generate."""

    target: Target
    url: str
    process: psutil.Process
    start_s: float

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the front ends and of the workers."""
        used = {"front_end": 0.0, "workers": 0.0}
        for role, process in self._processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                used[role] += times.user + times.system
        return used

    def forget_peak(self) -> None:
        """Lets `peak_bytes` count from now."""
        for role, process in self._processes():
            if role == "front_end":
                with suppress(OSError):
                    # proc(5): 5 sets the peak of the resident memory to what it is now.
                    Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most resident memory of the front ends since `forget_peak`, each at its own time."""
        peak = 0
        for role, process in self._processes():
            if role == "front_end":
                with suppress(OSError):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    peak += 1024 * int(status.partition("VmHWM:")[2].split()[0])
        return peak

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Each process, and whether it belongs to the workers or to the front ends."""
        for process in [self.process, *self.process.children(recursive=True)]:
            with suppress(psutil.Error):
                is_worker = self.target.is_worker(process, self.process)
                yield "workers" if is_worker else "front_end", process

    def jobs_by_worker(self) -> list[float]:
        """Prompts that each worker has completed; empty if the server has one worker."""
        if self.target.num_workers == 1:
            return []
        # /metrics shows the last heartbeat's figures.
        time.sleep(1.2)
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            text = response.read().decode()
        return [float(one) for one in re.findall(r"completed_jobs_total{.*} (\S+)", text)]


@contextmanager
def running(
    target: Target,
    engine: Engine,
    environ: Mapping[str, str],
    log: Path,
    cores: Collection[int] = (),
) -> Iterator[Running]:
    """Starts a server, yields it when it is ready, and stops it with all its processes.

    Args:
        cores: of the server; empty: any core.
    """
    port = free_port()
    words, variables = target.command(engine, port)
    begin = time.monotonic()
    with log.open("wb") as output:
        popen = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env={**environ, **variables}
        )
    if cores:
        # Before the server has threads, which inherit it.
        os.sched_setaffinity(popen.pid, cores)
    process, url = psutil.Process(popen.pid), f"http://127.0.0.1:{port}"
    descendants: list[psutil.Process] = []
    try:
        _wait_until_ready(target, url, popen, log)
        descendants = process.children(recursive=True)
        yield Running(target, url, process, time.monotonic() - begin)
    finally:
        popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            popen.kill()
        _, alive = psutil.wait_procs(descendants, timeout=STOP_TIMEOUT_S / 2)
        for one in alive:
            one.kill()


def _wait_until_ready(target: Target, url: str, popen: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and popen.poll() is None:
        try:
            with urllib.request.urlopen(url + target.ready_path, timeout=5) as response:
                if target.is_ready(response.status, response.read()):
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    sys.exit(
        f"{target.name} did not start; its log ends:\n{log.read_text(errors='replace')[-6000:]}"
    )


def engine_environment(*, on_cpu: bool, num_workers: int = 1) -> dict[str, str]:
    """This server's environment for its engines, used for every engine under test."""
    environ = dict(os.environ)
    prepare_environment(environ, on_cpu=on_cpu)
    config = ServerConfig(num_workers=num_workers)
    default_engine_options(config, environ, on_cpu=on_cpu, seed=0)
    if on_cpu:
        # As many threads as this server chooses itself for each of its engines.
        environ |= resources_of_worker(0, num_workers, config=config, gpus=()).variables
    here = str(Path(__file__).resolve().parent.parent)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environ.get("PYTHONPATH"))))
    return environ


def share_of(index: int, num_engines: int) -> Resources:
    """What this server's worker `index` of `num_engines` would run on."""
    config = ServerConfig(num_workers=num_engines)
    return resources_of_worker(index, num_engines, config=config, gpus=visible_gpus())
