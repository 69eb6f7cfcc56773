"""Agents that are commands: their environment, their output and their end.

Runs in: the trainer's process, in an event loop.
"""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from titopool.deadline import Deadline

# Between looks at a command.
POLL_S = 0.05
# From SIGTERM to SIGKILL, and for the end after it.
TERMINATE_S = 3.0
# Of what a command writes.
MAX_OUTPUT_BYTES = 64 * 1024 * 1024


def environment_of(base_url: str, api_key: str, task: str) -> dict[str, str]:
    """The variables of a command: the caller's without titopool's, whose keys open more than a session.

    Args:
        base_url: ends in `/v1`.
        task: JSON.
    """
    kept = {name: one for name, one in os.environ.items() if not name.startswith("TITOPOOL_")}
    # The anthropic package would send it, too.
    kept.pop("ANTHROPIC_AUTH_TOKEN", None)
    return {
        **kept,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "TITOPOOL_TASK": task,
    }


async def output_of(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """What a command writes to its standard output. A cancel ends it, and all that it has started in its
    process group.

    Raises:
        OSError: it cannot be started.
        subprocess.CalledProcessError: its exit status is not 0.
        RuntimeError: it writes too much.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                if sum(os.fstat(one.fileno()).st_size for one in (out, err)) > MAX_OUTPUT_BYTES:
                    raise RuntimeError(
                        f"command: expected at most {MAX_OUTPUT_BYTES} bytes of output, got more; "
                        "write to a file"
                    )
                await asyncio.sleep(POLL_S)
        finally:
            await _stop(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, *texts)
    return texts[0]


async def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a command that runs, and all that it has started in its group."""
    try:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            await _wait(process, TERMINATE_S)
    finally:
        _signal(process, signal.SIGKILL)
    await _wait(process, TERMINATE_S)


async def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = Deadline.after(timeout_s)
    while process.poll() is None and not deadline.has_passed:
        await asyncio.sleep(POLL_S)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
