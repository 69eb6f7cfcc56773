"""`python -m workers`: runs one worker by itself, for Compose and clusters.

    python -m workers --endpoint tcp://0.0.0.0:5555 [MODEL] [--setting VALUE …] [vLLM options]

The supervisor starts its workers the same way, with `--endpoint ipc://…`. The last step of
this process is `os._exit`: threads of a broken engine must not keep it.
"""

import asyncio
import logging
import os
import signal
import sys
from typing import NoReturn

from titopool.config import ServerConfig, from_command_line, ignored_variables
from titopool.errors import ConfigError
from titopool.gpus import visible_gpus
from titopool.logs import configure_logging
from workers.engine import VllmEngine
from workers.process import kill_children
from workers.server import WorkerServer
from workers.status import PhaseReporter

logger = logging.getLogger(__name__)

USAGE = "usage: python -m workers --endpoint tcp://ADDRESS:PORT [MODEL] [options of titopool serve]"


def take_option(argv: list[str], flag: str) -> str | None:
    """Removes `flag VALUE` from `argv` and returns VALUE; None when it is not there."""
    if flag not in argv:
        return None
    index = argv.index(flag)
    if index + 1 >= len(argv):
        raise ConfigError(f"{flag}: expected a value, got nothing")
    value = argv[index + 1]
    del argv[index : index + 2]
    return value


def main(argv: list[str]) -> int:
    """Runs the worker; returns its exit code."""
    endpoint = take_option(argv, "--endpoint")
    worker_id = take_option(argv, "--worker-id") or os.uname().nodename
    status_fd = take_option(argv, "--status-fd")
    parent_pid = take_option(argv, "--parent-pid")
    report = PhaseReporter(worker_id, int(status_fd) if status_fd else None)
    try:
        if endpoint is None:
            raise ConfigError(f"--endpoint is missing; {USAGE}")
        config = from_command_line(argv)
        configure_logging(config.log_level)
        if parent_pid is None and (ignored := ignored_variables()):
            logger.info("ignored variables of a Kubernetes Service: %s", ", ".join(ignored))
        reason = asyncio.run(
            serve(config, endpoint, worker_id, report, int(parent_pid) if parent_pid else None)
        )
    except Exception as error:
        if not isinstance(error, ConfigError):
            logger.exception("worker %s failed", worker_id)
        reason = describe_failure(error)
    if not reason:
        return 0
    report.failed(reason)
    return 1


async def serve(
    config: ServerConfig,
    endpoint: str,
    worker_id: str,
    report: PhaseReporter,
    parent_pid: int | None,
) -> str:
    """Serves until a signal comes or the engine dies; returns why ("" for a signal)."""
    server = WorkerServer(
        VllmEngine(config, on_cpu=not visible_gpus()),
        endpoint=endpoint,
        worker_id=worker_id,
        config=config,
        report=report,
        parent_pid=parent_pid,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    return await server.run()


def describe_failure(error: BaseException) -> str:
    """The cause of a failed start in one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def run() -> NoReturn:
    """The process's entry."""
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # What a thread that was still loading has started since.
    kill_children()
    os._exit(code)


# vLLM spawns its engine process, which imports this module again.
if __name__ == "__main__":
    run()
