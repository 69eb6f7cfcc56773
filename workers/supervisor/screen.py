"""Progress on the start screen: bars on a terminal, a line every few seconds elsewhere.

Several processes of a server write to the same terminal. So the cursor waits at the beginning of an
empty line above the bars: a line of another process lands there, and the bars are drawn again below.
"""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from tqdm import tqdm

# Between two lines of a worker, if standard error is no terminal.
LINE_PERIOD_S = 5.0
# The same for a phase without a known end.
QUIET_PERIOD_S = 30.0
REDRAW_S = 0.2
# Shorter than a log line, which is to cover what it overwrites.
MAX_COLUMNS = 64
MAX_BARS = 12
# tqdm's forms, also vLLM's: `Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<`.
_PROGRESS = re.compile(r"([A-Z][^:|\r\n]*?):?\s+\d+%[^|]*\|(?:[^|]*\|)?\s*(\d+)/(\d+) \[")


def progress_of(text: str) -> tuple[str, int, int] | None:
    """What the last progress bar in `text` is of, with its state and its end; None without one."""
    found = None
    for match in _PROGRESS.finditer(text):
        found = match[1], int(match[2]), int(match[3])
    return found


@dataclass
class Bar:
    """What one line shows."""

    what: str
    unit: str = ""
    done: int = 0
    # 0: the end is not known.
    total: int = 0
    began: float = field(default_factory=time.monotonic)
    # What the last line said, and when.
    shown: int = -1
    shown_at: float = field(default_factory=time.monotonic)


class Screen:
    """The bars of one process."""

    def __init__(self, stream: IO[str] | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._draws = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._bars: dict[str, Bar] = {}
        # Lines on the terminal below the cursor.
        self._num_drawn = 0
        self._drawn_at = 0.0

    def set(self, name: str, what: str, done: int = 0, total: int = 0, *, unit: str = "") -> None:
        """Shows that `name` does `what`, of which `done` of `total` is done."""
        bar = self._bars.get(name)
        if bar is None or bar.what != what:
            bar = self._bars[name] = Bar(what, unit)
        bar.done, bar.total = done, total

    def remove(self, name: str) -> None:
        """Forgets `name`."""
        self._bars.pop(name, None)

    def show(self, write: Callable[[], None]) -> None:
        """Calls `write`, which prints lines, with the bars out of its way."""
        self._erase()
        write()

    def tick(self) -> None:
        """Draws the bars, or prints lines that are due; called again and again."""
        now = time.monotonic()
        if not self._draws:
            for name, bar in self._bars.items():
                self._print_line(name, bar, now)
        elif self._bars and now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._draw(now)
        elif not self._bars:
            self._erase()

    def close(self) -> None:
        """Removes the bars."""
        self._bars.clear()
        self._erase()

    # ---- a terminal ------------------------------------------------------------------

    def _draw(self, now: float) -> None:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = MAX_COLUMNS
        width = min(MAX_COLUMNS, max(20, columns - 1))
        lines = [_meter(name, bar, now, width) for name, bar in self._bars.items()]
        if len(lines) > MAX_BARS:
            lines[MAX_BARS:] = [f"… and {len(lines) - MAX_BARS} more"]
        # The empty line stands first; the cursor goes back to it in the same write: another process's
        # line in between would stand below the bars, and be erased.
        bars = "".join(f"\n{line[:width]}" for line in lines)
        self._write(f"\r\x1b[J{bars}\r\x1b[{len(lines)}A")
        self._num_drawn = len(lines)

    def _erase(self) -> None:
        if self._num_drawn:
            self._num_drawn = 0
            self._write("\r\x1b[J")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # The terminal has gone; the server goes on.
            self._draws, self._num_drawn = False, 0

    # ---- lines -----------------------------------------------------------------------

    def _print_line(self, name: str, bar: Bar, now: float) -> None:
        period_s = LINE_PERIOD_S if bar.total else QUIET_PERIOD_S
        if now - bar.shown_at < period_s or (bar.total and bar.done == bar.shown):
            return
        bar.shown, bar.shown_at = bar.done, now
        text = f"{name}: {bar.what} for {now - bar.began:.0f} s"
        if bar.total:
            text = f"{name}: {bar.what}, {100 * bar.done // bar.total} %, {_amount(bar)}"
        self._write(text + "\n")


def _meter(name: str, bar: Bar, now: float, width: int) -> str:
    text: str = tqdm.format_meter(
        bar.done, bar.total or None, now - bar.began, ncols=width, prefix=f"{name}: {bar.what}",
        unit=bar.unit or "it", unit_scale=bool(bar.unit), unit_divisor=1000,
        bar_format=None if bar.total else "{desc} {elapsed}",
    )  # fmt: skip
    return text


def _amount(bar: Bar) -> str:
    if bar.unit:
        done, total = (tqdm.format_sizeof(one, bar.unit) for one in (bar.done, bar.total))
        return f"{done} of {total}"
    return f"{bar.done} of {bar.total}"
