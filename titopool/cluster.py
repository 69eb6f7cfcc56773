"""A server in a trainer's own Ray program: deploy, wait, scale, stop.

    import ray
    from titopool.cluster import RayServer

    ray.init()
    with RayServer("Qwen/Qwen3-8B", num_workers=4, options=["--max-model-len", "8192"]) as server:
        client = server.wait()
        ...
        server.scale(8)

The front ends are an actor on one node; each worker is an actor on the node that has its GPUs
(`workers/cluster/`). All of them end with the program. Needs titopool and Ray on every node.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from titopool.client.sync_client import Client
from titopool.errors import TitopoolError
from titopool.launch import child_environment
from titopool.settings.config import SECRET_VARIABLES, variable_of

# Importing titopool on a busy node takes most of it.
START_TIMEOUT_S = 180.0
# linux/prctl.h
PR_SET_PDEATHSIG = 1


class RayServer:
    """A running server on the cluster that this program is connected to."""

    def __init__(
        self,
        model: str = "",
        *,
        num_workers: int | str = 0,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        num_cpus: float = 2,
        scheduling_strategy: Any = "DEFAULT",
    ):
        """Starts the server; `wait` returns once its workers are ready.

        Args:
            model: folder, on every node, or name on the Hub.
            num_workers: "MIN..MAX": as many as waiting prompts need; 0: for all GPUs of the cluster.
            options: further ones of `titopool serve`.
            environment: variables of the server, for example `TITOPOOL_API_KEY`.
            num_cpus: cores that Ray reserves for the front ends.
            scheduling_strategy: Ray's, for the node of the front ends.

        Raises:
            TitopoolError: the front ends did not start.
        """
        import ray

        words = ["serve", *([model] if model else []), "--cluster", "ray"]
        words += ["--num-workers", str(num_workers), *options]
        self._keys = {name: (environment or {}).get(name, "") for name in SECRET_VARIABLES}
        path = child_environment(dict(os.environ)).get("PYTHONPATH")
        self._actor = (
            ray.remote(FrontEnds)
            .options(
                num_cpus=num_cpus, scheduling_strategy=scheduling_strategy,
                runtime_env={"env_vars": {"PYTHONPATH": path}} if path else {},
            )
            .remote(words, dict(environment or {}))
        )  # fmt: skip
        try:
            self.url: str = ray.get(self._actor.url.remote(), timeout=START_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            ray.kill(self._actor)
            raise TitopoolError(f"the front ends did not start: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client(self, timeout_s: float = 600.0) -> Client:
        """A new client of the server, with its keys."""
        return Client(
            self.url, api_key=self._keys[variable_of("api_key")],
            admin_key=self._keys[variable_of("admin_key")], timeout_s=timeout_s,
        )  # fmt: skip

    def wait(self, timeout_s: float = 900.0, *, num_workers: int = 1) -> Client:
        """A client, once `num_workers` workers are ready.

        Raises:
            TitopoolError: they are not within `timeout_s`; or the server has ended.
        """
        client = self.client()
        client.wait_until_ready(timeout_s, num_workers=num_workers)
        return client

    def scale(self, num_workers: int) -> None:
        """As `Client.scale`."""
        with self.client() as client:
            client.scale(num_workers)

    def stop(self) -> None:
        """Lets open requests finish (`drain_timeout_s`), then ends front ends and workers."""
        import ray

        try:
            ray.get(self._actor.stop.remote())
        finally:
            ray.kill(self._actor)


class FrontEnds:
    """The actor whose process is the parent of `titopool serve`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]):
        import ray

        address = ray.util.get_node_ip_address()
        port = _free_port(address)
        host = f"[{address}]" if ":" in address else address
        self._url = f"http://{host}:{port}"
        cluster = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "titopool.cli", *words, "--host", address, "--port", str(port)],
            env=child_environment({**os.environ, **cluster, **environment}),
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )

    def url(self) -> str:
        """The server's address, once it listens."""
        address, _, port = self._url.removeprefix("http://").rpartition(":")
        while self._process.poll() is None:
            try:
                socket.create_connection((address.strip("[]"), int(port)), timeout=1).close()
            except OSError:
                continue
            return self._url
        raise RuntimeError(f"titopool serve ended with code {self._process.returncode}")

    def stop(self) -> None:
        """Ends the server as SIGTERM does."""
        self._process.terminate()
        self._process.wait()


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """Runs in the child: the kernel sends it SIGTERM when the actor ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
