"""A worker's log file, and which of its lines are also shown on the screen.

The worker's own lines are always shown, those of vLLM only if they are errors (with log_level debug,
all).

The lines come from vLLM and other libraries, in the worker and in vLLM's processes. The worker's own
log lines arrive on another pipe (`workers/supervisor/phase_pipe.py`) and are written too. With
log_format json, lines that are not JSON objects become some.
"""

import json
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

from titopool.settings.logs import formatter_of, line_of, show_line
from titopool.wire.run_dir import LOG

logger = logging.getLogger(__name__)

# Of the log file; also of the previous one, whose name ends in `.1`.
MAX_FILE_BYTES = 16 * 2**20
# Logs of failed starts that are kept, over all servers of this user.
MAX_KEPT_LOGS = 10
# Limits of the log lines that the message of a failed start quotes.
QUOTED_LINES = 20
MAX_QUOTED_CHARACTERS = 400
# Lines of errors that are shown in one period.
MAX_ERRORS = 10
ERROR_PERIOD_S = 60.0
# Prefixes of vLLM's processes and of tensor-parallel ranks.
_SENDER = r"(?:\([^)]*\) |\[rank\d+\]:\s?)*"
_ERROR = re.compile(
    # vLLM: ERROR 11-21 22:15:55 [core.py:123] text
    rf"{_SENDER}(?:ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] (.*)"
    # Python's logging as this server has it: 2026-11-21 22:15:55,123 ERROR name: text
    r"|\d{4}-\d\d-\d\d [\d:,.]+ (?:ERROR|CRITICAL) (.*)"
    # glog and torch: [E1121 22:15:55.123 file.cpp:68] text
    rf"|{_SENDER}\[?[EF]\d{{4}} [\d:.]+ (.*)"
    # A crash of the interpreter, and a CUDA kernel that fails.
    r"|(Fatal Python error: .*)|(CUDA error.*)"
)
# The reasons that a worker reports when its engine process has failed. The engine process has
# logged the cause before.
_ENGINE_DIED = "EngineDead: "
_ENGINE_FAILED = ("Engine core initialization failed", _ENGINE_DIED)
# vLLM's log line before the cause. An engine process that was killed has not written it.
_ENGINE_DIES = "EngineCore encountered a fatal error"
# In exceptions that vLLM raises in one process because another process has failed.
_SUMMARY = "root cause"
_RAISED = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception)(?:: .+|$))")
# The statement of a bare `assert`, some lines above.
_ASSERTED = re.compile(r"\s(assert .+)")


def root_cause(lines: list[str], reason: str) -> tuple[str, list[str]]:
    """The cause of an engine's failure, and the log lines up to the cause.

    The cause is the last exception in `lines` that vLLM did not raise because of another one.
    Without such an exception, or if the engine did not fail, it is the worker's own `reason`.
    """
    was_killed = _ENGINE_DIED in reason and not any(_ENGINE_DIES in line for line in lines)
    if any(text in reason for text in _ENGINE_FAILED) and not was_killed:
        for index in reversed(range(len(lines))):
            found = _RAISED.search(lines[index])
            if found and _SUMMARY not in lines[index]:
                return found[1] + _asserted(found[1], lines[:index]), lines[: index + 1]
    return reason, lines


def _asserted(raised: str, lines: Sequence[str]) -> str:
    """The statement that raised an exception without a message."""
    found = (_ASSERTED.search(line) for line in reversed(lines[-3:]) if not raised.count(":"))
    return next((f": {one[1]}" for one in found if one), "")


def error_text(line: str) -> str:
    """The message of an error's log line; "" for other lines and for the lines of a traceback."""
    if (fields := _fields_of(line)) is not None:
        return str(fields.get("message")) if fields.get("level") in ("ERROR", "CRITICAL") else ""
    found = _ERROR.match(line)
    text = next((group for group in found.groups() if group is not None), "") if found else ""
    is_traceback = text[:1].isspace() or text.startswith("Traceback (most recent call last)")
    return "" if is_traceback else text


def _fields_of(line: str) -> dict[str, object] | None:
    """The fields of a line of log_format json; None for another line."""
    try:
        fields = json.loads(line) if line.startswith('{"level"') else None
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


class WorkerLog(RotatingFileHandler):
    """The log file of one worker, over all restarts of the worker."""

    def __init__(self, run_dir: str, index: int, *, is_kept: bool, log_format: str = "text"):
        """Begins a new file and keeps the file of the previous server under a name with `.1`.

        `is_kept` says whether the file outlives the server; the server removes a private `run_dir`.
        """
        self.path = Path(run_dir, LOG.format(index))
        super().__init__(
            self.path, maxBytes=MAX_FILE_BYTES, backupCount=1, encoding="utf-8", delay=True
        )
        self._worker = f"worker {index}"
        self._as_json = None if log_format == "text" else formatter_of(log_format, str(index))
        self._is_kept = is_kept
        self._is_broken = False
        # When the last errors were shown, and whether later errors were left out.
        self._shown_at: deque[float] = deque(maxlen=MAX_ERRORS)
        self._has_skipped = False
        if self.path.exists():
            try:
                self.doRollover()
            except OSError:
                self.handleError(logging.makeLogRecord({}))

    def write(self, line: str) -> None:
        """Adds `line`."""
        text = self._formed(line.encode(errors="replace").decode())
        self.emit(logging.makeLogRecord({"msg": text}))

    def _formed(self, line: str) -> str:
        """`line` as an object, with log_format json. The output of libraries has no objects."""
        if self._as_json is None or _fields_of(line) is not None:
            return line
        level = logging.ERROR if error_text(line) else logging.INFO
        return line_of(line, self._as_json, name="workers.output", level=level)

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by logging when a line cannot be written: a full disk must not stop the workers."""
        if not self._is_broken:
            logger.warning("%s cannot be written; log lines are lost", self.path, exc_info=True)
        self._is_broken = True

    def show(self, line: str) -> None:
        """Writes `line` to the screen with the worker's name, unless the line is blank."""
        if not line.strip():
            return
        if self._as_json is not None:
            show_line(self._formed(line))
        else:
            show_line(line if line.startswith(self._worker) else f"{self._worker} | {line}")

    def show_error(self, line: str) -> None:
        """Shows `line` if it is an error, at most `MAX_ERRORS` lines in `ERROR_PERIOD_S`."""
        if not error_text(line):
            return
        now, is_full = time.monotonic(), len(self._shown_at) == MAX_ERRORS
        if is_full and now - self._shown_at[0] < ERROR_PERIOD_S:
            if not self._has_skipped:
                self.show(f"more errors are in {self.path}")
            self._has_skipped = True
            return
        self._has_skipped = False
        self._shown_at.append(now)
        self.show(line)

    def excerpt(self, lines: Sequence[str]) -> str:
        """The last of `lines` and the path of the whole log, for the message of a failed start."""
        try:
            name = str(self.path if self._is_kept else self._copy())
        except (OSError, RuntimeError) as error:
            # RuntimeError: the user has no home directory.
            name = f"which is lost ({error})"
        quoted = "".join(f"\n    {line[:MAX_QUOTED_CHARACTERS]}" for line in lines[-QUOTED_LINES:])
        return f"  the last lines of its log, {name}:{quoted}"

    def _copy(self) -> Path:
        """Copies the file to the user's cache, which keeps the last `MAX_KEPT_LOGS` copies."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "titopool" / "failed-starts"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}-{self.path.name}"
        shutil.copyfile(self.path, folder / name)
        # Sorted by time: the names begin with it.
        for old in sorted(folder.glob("*.log"))[:-MAX_KEPT_LOGS]:
            old.unlink(missing_ok=True)
        return folder / name
