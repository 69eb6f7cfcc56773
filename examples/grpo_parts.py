"""What the examples of GRPO have in common: a server of their tiny model, and GRPO's arithmetic."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from titopool import Client, TitopoolError

CLIP = 0.2
TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 60.0


@contextmanager
def server_of(folder: str, *options: str) -> Iterator[str]:
    """The URL of a server of the folder's model, which is stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "titopool.cli", "serve", folder, "--port", port, *options]
    # In float32 the server's log-probabilities equal the trainer's.
    command += ["--dtype", "float32", "--log-level", "warning"]
    # A session of its own: Ctrl-C reaches this process only, which then stops the server.
    server = subprocess.Popen(command, start_new_session=True)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_S)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline, error = time.monotonic() + TIMEOUT_S, None
    with Client(url) as client:
        while server.poll() is None and time.monotonic() < deadline:
            try:
                client.wait_until_ready(timeout_s=5)
                return
            except TitopoolError as last:
                error = last
    sys.exit(f"expected a ready server, got status {server.poll()}, {error}: see its log above")


def advantages_of(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """[B]: the rewards, normalized in each group of `group_size` completions of one prompt."""
    groups = rewards.view(-1, group_size)
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def clipped_gain(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """What PPO maximizes, of each token, by its importance ratio and its advantage."""
    return torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def take_step(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """A step of the optimizer with clipped gradients."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
