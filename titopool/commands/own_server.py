"""A server that a command starts for itself, and stops with all its processes."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, NamedTuple

from titopool.client.results import WorkerStatus
from titopool.client.sync_client import Client
from titopool.errors import TitopoolError
from titopool.launch import child_environment
from titopool.settings.config import ServerConfig

STOP_TIMEOUT_S = 60.0
# Between two looks at the process while it starts.
LOOK_S = 2.0
# Linux's number of the option.
PR_SET_PDEATHSIG = 1
OnProgress = Callable[[tuple[WorkerStatus, ...]], None]


class OwnServer(NamedTuple):
    """A server that runs."""

    client: Client
    url: str


@contextmanager
def own_server(
    words: Sequence[str],
    *,
    environ: Mapping[str, str],
    output: IO[str] | IO[bytes],
    api_key: str = "",
    on_progress: OnProgress | None = None,
) -> Iterator[OwnServer]:
    """`titopool serve WORDS` on a free port, once it generates; stops it at the end.

    Args:
        environ: the server's environment.
        output: gets what the server prints.

    Raises:
        TitopoolError: the server ended, or was not ready within `worker_start_timeout_s`.
    """
    port = _free_port()
    command = [sys.executable, "-m", "titopool.cli", "serve", *words, "--port", str(port)]
    process = subprocess.Popen(
        command, env=child_environment(environ), stdin=subprocess.DEVNULL, stdout=output,
        stderr=output,
        # Ctrl-C reaches this process only, which stops the server.
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        with Client(url, api_key=api_key) as client:
            _wait(client, process, on_progress)
            yield OwnServer(client, url)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """In the child: the kernel sends it SIGTERM when this command is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _wait(client: Client, process: subprocess.Popen[bytes], on_progress: OnProgress | None) -> None:
    deadline = time.monotonic() + ServerConfig().worker_start_timeout_s
    while True:
        try:
            client.wait_until_ready(LOOK_S, on_progress)
            return
        except TitopoolError:
            if process.poll() is not None:
                raise TitopoolError(
                    f"the server ended with {process.returncode}; its last lines say why"
                ) from None
            if time.monotonic() > deadline:
                raise


def without_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environ` without this server's settings."""
    return {name: value for name, value in environ.items() if not name.startswith("TITOPOOL_")}
