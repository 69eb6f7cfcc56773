"""`python -m workers`: runs one worker, also without a supervisor (Docker Compose, clusters).

    python -P -m workers --endpoint tcp://0.0.0.0:5555 [MODEL] [--setting VALUE …] [vLLM options]

`--worker-id` is the worker's name in logs and metrics; the default is made of host name and
endpoint. `-P` keeps Python from importing modules of the working folder in place of titopool's.

The supervisor starts its workers with `--endpoint ipc://…`. The process ends with `os._exit`, so
that the threads of a broken engine cannot keep it alive.
"""

import asyncio
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig
from titopool.settings.gpus import visible_gpus
from titopool.settings.logs import configure_logging
from titopool.settings.sources import check_model, from_command_line, ignored_variables
from titopool.wire.run_dir import own_run_dir
from workers.engine.vllm import VllmEngine
from workers.forks import part_forks
from workers.process import EXIT_FAILED, EXIT_STOPPED, kill_children, write_stacks_on_signal
from workers.serving.server import WorkerServer
from workers.supervisor.phase_pipe import PhaseReporter

# Not __name__, which is "__main__".
logger = logging.getLogger("workers")

USAGE = (
    "usage: python -P -m workers --endpoint tcp://ADDRESS:PORT [--worker-id NAME] "
    "[--ready-file PATH] [MODEL] [options of titopool serve]"
)
# Addresses that bind every interface of a host.
ANY_ADDRESS = ("0.0.0.0", "*", "[::]", "::")


def take_option(argv: list[str], flag: str) -> str | None:
    """Removes `flag VALUE` or `flag=VALUE` from `argv` and returns VALUE, or None without the flag.

    Raises:
        ConfigError: no value follows the flag.
    """
    for index, word in enumerate(argv):
        if word.startswith(flag + "="):
            del argv[index]
            return word.removeprefix(flag + "=")
        if word == flag:
            if index + 1 >= len(argv):
                raise ConfigError(f"{flag}: expected a value, got nothing")
            value = argv[index + 1]
            del argv[index : index + 2]
            return value
    return None


def default_worker_id(endpoint: str) -> str:
    """Host name and endpoint: no other worker of the host has the same endpoint."""
    scheme, _, name = endpoint.partition("://")
    if scheme == "ipc":
        name = os.path.abspath(name).strip("/").replace("/", "-")
    else:
        address, _, port = name.rpartition(":")
        name = port if address in ANY_ADDRESS else f"{address}-{port}"
    return f"{os.uname().nodename}-{name}"


def checked_worker_id(worker_id: str) -> str:
    """Returns `worker_id`, which becomes part of a file name.

    Raises:
        ConfigError: `worker_id` has characters that a file name cannot have.
    """
    if not re.fullmatch(r"[\w.:\[\]-]{1,200}", worker_id):
        raise ConfigError(
            f"--worker-id: expected letters, digits, '.', ':', '-' and '_', got {worker_id!r}"
        )
    return worker_id


def main(argv: list[str]) -> int:
    """Runs the worker; returns its exit code."""
    worker_id = os.uname().nodename
    report = PhaseReporter(worker_id, None)
    try:
        endpoint = take_option(argv, "--endpoint")
        if endpoint is None:
            raise ConfigError(f"--endpoint is missing; {USAGE}")
        worker_id = checked_worker_id(
            take_option(argv, "--worker-id") or default_worker_id(endpoint)
        )
        status_fd = take_option(argv, "--status-fd")
        parent_pid = take_option(argv, "--parent-pid")
        ready_file = take_option(argv, "--ready-file")
        report = PhaseReporter(worker_id, int(status_fd) if status_fd else None, ready_file)
        part_forks(report.let_go)
        write_stacks_on_signal()
        config = from_command_line(argv)
        check_model(config)
        if config.run_dir:
            own_run_dir(config.run_dir)
        configure_logging(
            config.log_level, report.log_handler(),
            log_format=config.log_format, worker=worker_id,
        )  # fmt: skip
        if parent_pid is None and (ignored := ignored_variables()):
            logger.info(
                "ignored variables that Kubernetes sets for a Service: %s", ", ".join(ignored)
            )
        reason, code = asyncio.run(
            serve(config, endpoint, worker_id, report, int(parent_pid) if parent_pid else None)
        )
    except Exception as error:
        if not isinstance(error, ConfigError):
            # The supervisor writes the traceback to the worker's log file.
            traceback.print_exception(error)
        reason, code = describe_failure(error), EXIT_FAILED
    if reason:
        report.failed(reason)
    return code


async def serve(
    config: ServerConfig,
    endpoint: str,
    worker_id: str,
    report: PhaseReporter,
    parent_pid: int | None,
) -> tuple[str, int]:
    """Serves until a signal arrives or the engine dies. SIGTERM lets the jobs in flight finish.

    Returns the reason for the end ("" after a signal) and the exit code.
    """
    server = WorkerServer(
        VllmEngine(config, on_cpu=not visible_gpus()),
        endpoint=endpoint,
        worker_id=worker_id,
        config=config,
        report=report,
        report_load=report.load,
        report_endpoint=report.endpoint,
        report_alive=report.alive,
        parent_pid=parent_pid,
    )

    def end(how: Callable[[], None]) -> None:
        # vLLM logs a traceback when an engine process ends, even if vLLM itself has stopped it.
        logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
        how()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end, server.drain)
    loop.add_signal_handler(signal.SIGINT, end, server.stop)
    reason = await server.run()
    return reason, server.exit_code if reason else EXIT_STOPPED


def describe_failure(error: BaseException) -> str:
    """The cause of a failed start in one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def run() -> NoReturn:
    """Runs the worker and ends the process."""
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that was still loading the model may have started processes since the last kill.
    kill_children()
    os._exit(code)


# vLLM spawns its engine process, which imports this module a second time.
if __name__ == "__main__":
    run()
