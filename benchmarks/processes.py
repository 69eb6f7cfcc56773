"""Starts a server, waits until it is ready, counts its CPU time and stops it."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.targets import Engine, Target
from tests.servers import free_port

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
        for process in [self.process, *self.process.children(recursive=True)]:
            try:
                times = process.cpu_times()
                role = "workers" if self.target.is_worker(process, self.process) else "front_end"
            except psutil.Error:
                continue
            used[role] += times.user + times.system
        return used

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
    target: Target, engine: Engine, environ: Mapping[str, str], log: Path
) -> Iterator[Running]:
    """Starts a server, yields it when it is ready, and stops it with all its processes."""
    port = free_port()
    words, variables = target.command(engine, port)
    begin = time.monotonic()
    with log.open("wb") as output:
        popen = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env={**environ, **variables}
        )
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
    from titopool.settings.config import ServerConfig
    from workers.environment import default_engine_options, prepare_environment
    from workers.supervisor.resources import resources_of_worker

    environ = dict(os.environ)
    prepare_environment(environ, on_cpu=on_cpu)
    config = ServerConfig(num_workers=num_workers)
    default_engine_options(config, environ, on_cpu=on_cpu, seed=0)
    if on_cpu:
        environ |= resources_of_worker(0, 1, config=config, gpus=()).variables
    here = str(Path(__file__).resolve().parent.parent)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environ.get("PYTHONPATH"))))
    return environ
