"""Starts one worker process for each engine and keeps them running.

Runs in: a process of its own under gunicorn's master, one thread. Owns: the workers'
processes and the pipes on which they log and report their phase. Each turn compares what
should run with what does. A worker that never was ready stops the server with the cause;
one that was is started again, with a growing pause.
"""

import argparse
import contextlib
import logging
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from titopool.errors import ConfigError
from titopool.settings.config import FAILURE_FILE, ServerConfig
from titopool.settings.gpus import visible_gpus
from titopool.settings.logs import configure_logging, show
from titopool.settings.sources import from_environment
from titopool.wire.sockets import worker_endpoint
from workers.environment import worker_placement
from workers.ledger import clear_ledgers
from workers.supervisor.greeting import answers, greeting
from workers.supervisor.phase_pipe import Report
from workers.supervisor.worker_log import WorkerLog

# Its own name is __main__ here.
logger = logging.getLogger("workers.supervisor")

TURN_S = 0.2
STOP_TIMEOUT_S = 4.0
LAST_LINES = 300
WORKER_COMMAND = (sys.executable, "-m", "workers")
# What a worker says when its engine process has failed; that process has logged the reason before.
ENGINE_FAILED = ("Engine core initialization failed", "EngineDead: ")
# vLLM's line before the reason when it fails after its start; one that was killed has none.
ENGINE_DIES = "EngineCore encountered a fatal error"
# In what vLLM raises in one process because another one has failed.
SUMMARY = "root cause"
RAISED = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)")
LONGEST_PAUSE_S = 60.0
# A worker that was ready for less than this died quickly.
QUICK_DEATH_S = 60.0
# A pool without any worker is given up after so many failed starts in a row.
MAX_FAILED_STARTS = 3


@dataclass
class WorkerProcess:
    """What should be one running worker."""

    index: int
    log: WorkerLog
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_after: float = 0.0
    phase: str = ""
    failure: str = ""
    has_been_ready: bool = False
    num_failed_starts: int = 0
    ready_at: float = 0.0
    num_quick_deaths: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    pending: dict[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"worker {self.index}"


class StartFailed(Exception):
    """The pool cannot start; the message is the cause."""


class Supervisor:
    """Runs the workers of one server."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        parent_pid: int,
        url: str | None,
        keeps_run_dir: bool = True,
        worker_command: Sequence[str] = WORKER_COMMAND,
    ):
        """`url` is where the server answers, for the greeting; `parent_pid` gunicorn's master.

        Unless it `keeps_run_dir`, the log of a failed start is copied to another folder.
        """
        self._config = config
        self._parent_pid = parent_pid
        self._url = url
        self._worker_command = worker_command
        self._gpus = visible_gpus()
        self._workers = [
            WorkerProcess(index, WorkerLog(config.run_dir, index, is_kept=keeps_run_dir))
            for index in range(config.num_workers)
        ]
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._has_greeted = False

    def stop(self, *_: object) -> None:
        """Makes `run` return; a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Keeps the workers running until `stop` or the end of the parent.

        Raises:
            StartFailed: a worker could not start at all.
        """
        clear_ledgers(self._config.run_dir)
        if self._config.log_level != "debug":
            logs = ", ".join(str(worker.log.path) for worker in self._workers)
            logger.info("what vLLM writes goes to %s; log_level debug shows it here", logs)
        try:
            while not self._stopping and os.getppid() == self._parent_pid:
                self._turn()
        finally:
            self._stopping = True
            self._stop_all()

    def _turn(self) -> None:
        self._read_pipes()
        for worker in self._workers:
            self._reap(worker)
            self._check_start_time(worker)
            if worker.process is None and time.monotonic() >= worker.start_after:
                self._start(worker)
        self._greet_when_ready()

    # ---- starting --------------------------------------------------------------------

    def _start(self, worker: WorkerProcess) -> None:
        endpoint = worker_endpoint(self._config.run_dir, worker.index)
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        status_read, status_write = os.pipe()
        placement = worker_placement(
            worker.index, len(self._workers), config=self._config, gpus=self._gpus
        )
        worker.process = subprocess.Popen(
            [
                *self._worker_command, "--endpoint", endpoint,
                "--worker-id", str(worker.index), "--parent-pid", str(os.getpid()),
                "--status-fd", str(status_write),
            ],
            # It goes to a file, where more is better.
            env={"VLLM_LOGGING_LEVEL": "INFO"} | os.environ | placement.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(status_write,),
            # The worker leads a group of its own: killing the group ends vLLM's processes too.
            start_new_session=True,
        )  # fmt: skip
        os.close(status_write)
        if placement.cores:
            os.sched_setaffinity(worker.process.pid, placement.cores)
        worker.started_at = time.monotonic()
        worker.phase = worker.failure = ""
        worker.last_lines.clear()
        worker.log.write(
            f"---- {worker.name} starts, process {worker.process.pid}, {time.strftime('%F %T')} ----"
        )
        worker.pending = {"log": b"", "status": b""}
        assert worker.process.stdout is not None
        self._watch(worker.process.stdout, worker, "log")
        self._watch(os.fdopen(status_read, "rb", buffering=0), worker, "status")

    def _watch(self, pipe: IO[bytes], worker: WorkerProcess, kind: str) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, (worker, kind))

    # ---- reading ---------------------------------------------------------------------

    def _read_pipes(self) -> None:
        for key, _ in self._selector.select(TURN_S):
            worker, kind = key.data
            chunk = os.read(key.fd, 65_536)
            if not chunk:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                if kind != "log" or not worker.pending[kind]:
                    continue
                # A process that was killed did not end its last line.
                chunk = b"\n"
            *lines, worker.pending[kind] = (worker.pending[kind] + chunk).split(b"\n")
            for line in lines:
                if kind == "log":
                    self._on_log_line(worker, line)
                else:
                    self._on_report(worker, msgspec.json.decode(line, type=Report))

    def _on_log_line(self, worker: WorkerProcess, line: bytes) -> None:
        # A progress bar writes over its line; what it showed last is enough.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        worker.last_lines.append(text)
        worker.log.write(text)
        if self._config.log_level == "debug":
            worker.log.show(text)
        elif worker.phase == "ready" and not self._stopping:
            worker.log.show_error(text)

    def _on_report(self, worker: WorkerProcess, report: Report) -> None:
        worker.phase = report.phase or worker.phase
        worker.failure = report.failure or worker.failure
        for line in report.log.splitlines():
            worker.last_lines.append(line)
            worker.log.write(line)
            worker.log.show(line)
        if report.phase == "ready":
            worker.has_been_ready = True
            worker.num_failed_starts = 0
            worker.ready_at = time.monotonic()

    # ---- ending ----------------------------------------------------------------------

    def _reap(self, worker: WorkerProcess) -> None:
        if worker.process is None or worker.process.poll() is None:
            return
        code = worker.process.returncode
        self._kill_group(worker)
        # Its last words may still be in the pipes.
        self._read_pipes()
        worker.process = None
        cause = worker.failure or describe_exit(code)
        if worker.phase == "ready":
            pause_s = self._pause_after_death(worker)
            logger.error(
                "%s died: %s; starting it again in %g s; its log is %s",
                worker.name, cause, pause_s, worker.log.path,
            )  # fmt: skip
            worker.start_after = time.monotonic() + pause_s
            return
        worker.num_failed_starts += 1
        if not worker.has_been_ready or self._is_hopeless():
            raise StartFailed(self._describe(worker, cause))
        pause_s = min(2.0**worker.num_failed_starts, LONGEST_PAUSE_S)
        logger.error(
            "%s did not start: %s; again in %.0f s; its log is %s",
            worker.name, cause, pause_s, worker.log.path,
        )  # fmt: skip
        worker.start_after = time.monotonic() + pause_s

    def _pause_after_death(self, worker: WorkerProcess) -> float:
        """None after a long life; growing when a worker dies soon after each start."""
        has_lived_s = time.monotonic() - worker.ready_at
        worker.num_quick_deaths = worker.num_quick_deaths + 1 if has_lived_s < QUICK_DEATH_S else 0
        if worker.num_quick_deaths < 2:
            return 0.0
        return min(2.0**worker.num_quick_deaths, LONGEST_PAUSE_S)

    def _is_hopeless(self) -> bool:
        return all(
            worker.process is None and worker.num_failed_starts >= MAX_FAILED_STARTS
            for worker in self._workers
        )

    def _describe(self, worker: WorkerProcess, cause: str) -> str:
        lines = [line for line in worker.last_lines if line.strip()]
        if any(text in cause for text in ENGINE_FAILED):
            cause, lines = root_cause(lines, cause)
        phase = worker.phase or "starting"
        return f"{worker.name} could not start ({phase}): {cause}\n{worker.log.quoted(lines)}"

    def _check_start_time(self, worker: WorkerProcess) -> None:
        limit_s = self._config.worker_start_timeout_s
        is_starting = worker.process is not None and worker.phase != "ready"
        if is_starting and time.monotonic() - worker.started_at > limit_s:
            worker.failure = (
                f"not ready after {limit_s:g} s, still {worker.phase or 'starting'}; "
                "raise worker_start_timeout_s"
            )
            self._kill_group(worker)

    def _kill_group(self, worker: WorkerProcess) -> None:
        assert worker.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)

    def _stop_all(self) -> None:
        running = [worker for worker in self._workers if worker.process is not None]
        for worker in running:
            assert worker.process is not None
            worker.process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(one.process and one.process.poll() is None for one in running):
            if time.monotonic() > deadline:
                break
            # A worker that has filled a pipe could not end.
            self._read_pipes()
        for worker in running:
            assert worker.process is not None
            self._kill_group(worker)
            worker.process.wait()

    # ---- greeting --------------------------------------------------------------------

    def _greet_when_ready(self) -> None:
        if self._has_greeted or any(worker.phase != "ready" for worker in self._workers):
            return
        if self._url is not None and not answers(self._url + "/health"):
            return
        self._has_greeted = True
        show(greeting(self._config, self._url))


def root_cause(lines: list[str], fallback: str) -> tuple[str, list[str]]:
    """The last exception that the log shows before vLLM's summaries, and the lines up to it."""
    if "EngineDead: " in fallback and not any(ENGINE_DIES in line for line in lines):
        return fallback, lines
    for index in reversed(range(len(lines))):
        found = RAISED.search(lines[index])
        if found and SUMMARY not in lines[index]:
            return found[1], lines[: index + 1]
    return fallback, lines


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL); the machine is perhaps out of memory"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it exited with code {code}"


def main(argv: Sequence[str] | None = None, worker_command: Sequence[str] = WORKER_COMMAND) -> int:
    """Runs the supervisor; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers.supervisor")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--url")
    parser.add_argument("--remove-run-dir", action="store_true")
    arguments = parser.parse_args(argv)
    config = from_environment()
    configure_logging(config.log_level)
    supervisor = Supervisor(
        config,
        parent_pid=arguments.parent_pid,
        url=arguments.url,
        keeps_run_dir=not arguments.remove_run_dir,
        worker_command=worker_command,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    try:
        supervisor.run()
        if arguments.remove_run_dir and os.getppid() != arguments.parent_pid:
            # The master was killed and cannot tidy up.
            shutil.rmtree(config.run_dir, ignore_errors=True)
        return 0
    except (StartFailed, ConfigError) as error:
        cause = str(error)
    except Exception as error:
        logger.exception("the supervisor failed")
        cause = f"the supervisor failed: {error}"
    show(f"\ntitopool: {cause}\n")
    try:
        # The master reads this at its end, to exit with an error too.
        (Path(config.run_dir) / FAILURE_FILE).write_text(cause)
    finally:
        if os.getppid() == arguments.parent_pid:
            os.kill(arguments.parent_pid, signal.SIGTERM)
    return 1
