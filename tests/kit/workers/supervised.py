"""A real supervisor whose workers run a piece of Python instead of an engine.

    python -m tests.kit.workers.supervised CODE

CODE runs in each worker with the worker's phase reports and logging: `report("ready")` begins a
phase, `wait()` returns at SIGTERM or SIGINT. Settings come from the environment.
"""

import logging
import os
import signal
import sys
import time

from titopool.settings.logs import configure_logging
from workers.__main__ import describe_failure, take_option
from workers.supervisor import supervisor
from workers.supervisor.phase_pipe import PhaseReporter


def work(code: str, argv: list[str]) -> int:
    """A worker process."""
    status_fd, worker_id = take_option(argv, "--status-fd"), take_option(argv, "--worker-id")
    report = PhaseReporter(worker_id or "", int(status_fd or 0))
    configure_logging("info", report.log_handler())
    stopped: list[int] = []
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda number, _: stopped.append(number))

    def wait() -> None:
        while not stopped:
            time.sleep(0.01)

    names = {
        "report": report, "wait": wait, "os": os, "sys": sys, "time": time,
        "logger": logging.getLogger("workers.test"), "library": logging.getLogger("vllm.core"),
        "write": lambda text: print(text, file=sys.stderr, flush=True),
    }  # fmt: skip
    try:
        exec(code, names)
    except Exception as error:
        report.failed(describe_failure(error))
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        sys.exit(work(sys.argv[2], sys.argv[3:]))
    command = (sys.executable, "-m", "tests.kit.workers.supervised", "--worker", sys.argv[1])
    options = ["--parent-pid", str(os.getppid()), *sys.argv[2:]]
    sys.exit(supervisor.main(options, command))
