"""What a worker tells its supervisor on their pipe, one JSON object a line."""

import os
import sys
import time

import msgspec


class Report(msgspec.Struct, omit_defaults=True):
    """A phase that has begun, or the reason of the worker's end."""

    phase: str = ""
    failure: str = ""


class PhaseReporter:
    """Shows each phase with how long the one before took, and tells the supervisor, if any."""

    def __init__(self, worker_id: str, status_fd: int | None):
        self._worker_id = worker_id
        self._status_fd = status_fd
        self._phase = ""
        self._since = self._begin = time.monotonic()

    def __call__(self, phase: str) -> None:
        """Begins `phase`."""
        now = time.monotonic()
        text = f"worker {self._worker_id}: {phase}"
        if self._phase:
            text += f" ({self._phase} took {now - self._since:.1f} s"
            text += f", {now - self._begin:.1f} s in all)" if phase == "ready" else ")"
        print(text, file=sys.stderr, flush=True)
        self._phase, self._since = phase, now
        self._tell(Report(phase=phase))

    def failed(self, reason: str) -> None:
        """Says why the worker ends."""
        print(f"worker {self._worker_id}: {reason}", file=sys.stderr, flush=True)
        self._tell(Report(failure=reason))

    def _tell(self, report: Report) -> None:
        if self._status_fd is not None:
            os.write(self._status_fd, msgspec.json.encode(report) + b"\n")
