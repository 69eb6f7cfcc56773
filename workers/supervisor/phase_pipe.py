"""A worker's reports to its supervisor: JSON Lines on a pipe.

The worker's own log lines travel on the same pipe, so that the supervisor can tell them from the
lines that vLLM writes to standard error.
"""

import logging
import os
import select
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from titopool.settings.logs import show


class Load(msgspec.Struct, array_like=True):
    """What a worker has to do."""

    # Prompts that wait in all front ends for a worker.
    num_waiting: int
    # Completions in flight here, and how many the engine can run at once.
    num_running: int
    num_slots: int


class Report(msgspec.Struct, omit_defaults=True):
    """A new phase, the reason for the worker's end, lines for the screen, the load, or a sign of life."""

    phase: str = ""
    failure: str = ""
    log: str = ""
    load: Load | None = None
    # Of a worker that listens at a port of the kernel's choice.
    endpoint: str = ""
    # A sign of life, and nothing else.
    is_alive: bool = False


class PhaseReporter:
    """Reports each phase and the duration of the phase before it.

    The reports go to the supervisor, or to standard error in a worker without one.
    """

    def __init__(self, worker_id: str, status_fd: int | None, ready_file: str | None = None):
        """`ready_file` exists while the worker takes jobs, for probes of containers and scripts."""
        self._worker_id = worker_id
        self._status_fd = status_fd
        self._ready_file = Path(ready_file) if ready_file else None
        self._phase = ""
        self._load: Load | None = None
        self._since = self._begin = time.monotonic()
        # Guards the pipe: several threads log.
        self._lock = threading.Lock()

    def __call__(self, phase: str) -> None:
        """Reports that `phase` has begun."""
        now = time.monotonic()
        text = f"worker {self._worker_id}: {phase}"
        if self._phase:
            text += f" ({self._phase} took {now - self._since:.1f} s"
            text += f", {now - self._begin:.1f} s in all)" if phase == "ready" else ")"
        self._phase, self._since = phase, now
        if self._ready_file is not None and phase == "ready":
            self._ready_file.touch()
        elif self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)
        self._send(Report(phase=phase, log=text))

    def load(self, load: Load) -> None:
        """Reports the load if it has changed, for a supervisor that scales the pool."""
        if self._status_fd is not None and load != self._load:
            self._load = load
            self._send(Report(load=load))

    def alive(self) -> None:
        """Reports that the process runs: in its place a ready file grows old. Waits for nobody."""
        if self._status_fd is not None:
            pipe = select.poll()
            pipe.register(self._status_fd, select.POLLOUT)
            # A supervisor that stands reads nothing. One that has ended is the loop's to notice.
            if pipe.poll(0) == [(self._status_fd, select.POLLOUT)]:
                self._send(Report(is_alive=True))
        if self._ready_file is not None:
            # It exists only while the worker takes jobs.
            with suppress(OSError):
                os.utime(self._ready_file)

    def endpoint(self, endpoint: str) -> None:
        """Reports where the worker listens."""
        if self._status_fd is not None:
            self._send(Report(endpoint=endpoint))

    def failed(self, reason: str) -> None:
        """Reports why the worker ends."""
        if self._status_fd is None:
            show(f"worker {self._worker_id}: {reason}")
        else:
            # The supervisor shows the reason, and whether it restarts the worker.
            self._send(Report(failure=reason))

    def log_handler(self) -> logging.Handler | None:
        """A handler that sends titopool's log lines to the supervisor; None without a supervisor."""
        return None if self._status_fd is None else _ReportHandler(self)

    def let_go(self) -> None:
        """In a fork: leaves the pipe to the worker, and writes log lines to standard error.

        Records above 4 KiB from two processes could mix.
        """
        # Another thread may have held the lock when the process forked.
        self._lock = threading.Lock()
        if self._status_fd is not None:
            os.close(self._status_fd)
            self._status_fd = None

    def show(self, text: str) -> None:
        """Shows `text`, one or more lines."""
        self._send(Report(log=text))

    def _send(self, report: Report) -> None:
        if self._status_fd is None:
            show(report.log)
            return
        # File names may hold lone surrogates, which JSON cannot encode.
        report.log = report.log.encode(errors="backslashreplace").decode()
        report.failure = report.failure.encode(errors="backslashreplace").decode()
        rest = msgspec.json.encode(report) + b"\n"
        with self._lock:
            while rest:
                rest = rest[os.write(self._status_fd, rest) :]


class _ReportHandler(logging.Handler):
    def __init__(self, report: PhaseReporter):
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._report.show(self.format(record))
        except BrokenPipeError:
            # The supervisor has ended; the worker's heartbeat loop notices that and stops.
            pass
        except Exception:
            self.handleError(record)
