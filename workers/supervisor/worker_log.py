"""What a worker and vLLM's processes below it write: a file of limited size, and little of it on the screen.

Runs in: the supervisor. The worker's own log lines come on another pipe (`workers/supervisor/phase_pipe.py`); these are
those of vLLM and other libraries, which write as they like.
"""

import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

from titopool.settings.logs import show

logger = logging.getLogger(__name__)

# Of a file, and of the one before it, which has `.1` behind its name.
MAX_FILE_BYTES = 16 * 2**20
# Logs of starts that failed, over all servers of this user.
MAX_KEPT_LOGS = 10
# Of the message of a failed start.
QUOTED_LINES = 20
MAX_QUOTED_CHARACTERS = 400
# How many lines of errors are shown in one period.
MAX_ERRORS = 10
ERROR_PERIOD_S = 60.0
# What vLLM's processes and those of tensor parallelism put before their lines.
_SENDER = r"(?:\([^)]*\) |\[rank\d+\]:\s?)*"
_ERROR = re.compile(
    # vLLM: ERROR 11-21 22:15:55 [core.py:123] text
    rf"{_SENDER}(?:ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] (.*)"
    # Python's logging as this server has it: 2026-11-21 22:15:55,123 ERROR name: text
    r"|\d{4}-\d\d-\d\d [\d:,.]+ (?:ERROR|CRITICAL) (.*)"
    # glog and torch: [E1121 22:15:55.123 file.cpp:68] text
    rf"|{_SENDER}\[?[EF]\d{{4}} [\d:.]+ (.*)"
    # An interpreter that crashes, and a kernel that fails.
    r"|(Fatal Python error: .*)|(CUDA error.*)"
)


def error_text(line: str) -> str:
    """What `line` says, if it is an error's; "" for all else, also for the lines of a traceback."""
    found = _ERROR.match(line)
    text = next((group for group in found.groups() if group is not None), "") if found else ""
    is_traceback = text[:1].isspace() or text.startswith("Traceback (most recent call last)")
    return "" if is_traceback else text


class WorkerLog(RotatingFileHandler):
    """The file of one worker, which goes on when the worker is started again."""

    def __init__(self, run_dir: str, index: int, *, is_kept: bool):
        """Begins a new file; that of a server before this one stays beside it.

        It `is_kept` when the server has ended, unless the folder is the server's own.
        """
        self.path = Path(run_dir) / f"worker-{index}.log"
        super().__init__(
            self.path, maxBytes=MAX_FILE_BYTES, backupCount=1, encoding="utf-8", delay=True
        )
        self._worker = f"worker {index}"
        self._is_kept = is_kept
        self._is_broken = False
        # When the last errors were shown, and whether there were more than that.
        self._shown_at: deque[float] = deque(maxlen=MAX_ERRORS)
        self._has_more = False
        if self.path.exists():
            self.doRollover()

    def write(self, line: str) -> None:
        """Adds `line`."""
        self.emit(logging.makeLogRecord({"msg": line.encode(errors="replace").decode()}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Called when a line cannot be written: a full disk does not stop the workers."""
        if not self._is_broken:
            logger.warning("%s cannot be written; lines are lost", self.path, exc_info=True)
        self._is_broken = True

    def show(self, line: str) -> None:
        """Writes `line` to the screen with the worker's name, if there is something in it."""
        if line.strip():
            prefix = "" if line.startswith(self._worker) else f"{self._worker} | "
            show(prefix + line)

    def show_error(self, line: str) -> None:
        """Shows `line` if it is an error's, but few of them in each period."""
        if not error_text(line):
            return
        now, is_full = time.monotonic(), len(self._shown_at) == MAX_ERRORS
        if is_full and now - self._shown_at[0] < ERROR_PERIOD_S:
            if not self._has_more:
                self.show(f"more errors are in {self.path}")
            self._has_more = True
            return
        self._has_more = False
        self._shown_at.append(now)
        self.show(line)

    def quoted(self, lines: Sequence[str]) -> str:
        """The end of `lines`, and where all are."""
        try:
            name = str(self.path if self._is_kept else self._copy())
        except (OSError, RuntimeError) as error:
            # The latter: this user has no home.
            name = f"which is lost ({error})"
        quoted = "".join(f"\n    {line[:MAX_QUOTED_CHARACTERS]}" for line in lines[-QUOTED_LINES:])
        return f"  the last lines of its log, {name}:{quoted}"

    def _copy(self) -> Path:
        """Copies the file to the user's cache, where few of them stay."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "titopool" / "failed-starts"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}-{self.path.name}"
        shutil.copyfile(self.path, folder / name)
        # Names begin with the time.
        for old in sorted(folder.glob("*.log"))[:-MAX_KEPT_LOGS]:
            old.unlink(missing_ok=True)
        return folder / name
