"""What a worker tells its supervisor on their pipe, one JSON object a line.

The worker's own log lines go there too, so that the supervisor knows them from what vLLM
writes to standard error.
"""

import logging
import os
import threading
import time

import msgspec

from titopool.settings.logs import show


class Report(msgspec.Struct, omit_defaults=True):
    """A phase that has begun, the reason of the worker's end, or lines for the screen."""

    phase: str = ""
    failure: str = ""
    log: str = ""


class PhaseReporter:
    """Shows each phase with how long the one before took; to a supervisor, if there is one."""

    def __init__(self, worker_id: str, status_fd: int | None):
        self._worker_id = worker_id
        self._status_fd = status_fd
        self._phase = ""
        self._since = self._begin = time.monotonic()
        # Of the pipe: threads log too.
        self._lock = threading.Lock()

    def __call__(self, phase: str) -> None:
        """Begins `phase`."""
        now = time.monotonic()
        text = f"worker {self._worker_id}: {phase}"
        if self._phase:
            text += f" ({self._phase} took {now - self._since:.1f} s"
            text += f", {now - self._begin:.1f} s in all)" if phase == "ready" else ")"
        self._phase, self._since = phase, now
        self._tell(Report(phase=phase, log=text))

    def failed(self, reason: str) -> None:
        """Says why the worker ends."""
        if self._status_fd is None:
            show(f"worker {self._worker_id}: {reason}")
        else:
            # The supervisor shows it with what it does about it.
            self._tell(Report(failure=reason))

    def log_handler(self) -> logging.Handler | None:
        """What hands our own log lines to the supervisor; None if there is none."""
        return None if self._status_fd is None else _ReportHandler(self)

    def show(self, text: str) -> None:
        """Shows `text`, which may have several lines."""
        self._tell(Report(log=text))

    def _tell(self, report: Report) -> None:
        if self._status_fd is None:
            show(report.log)
            return
        # Some of it could otherwise not be written: names of files, say.
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
            # The supervisor is gone; the worker notices by itself and ends.
            pass
        except Exception:
            self.handleError(record)
