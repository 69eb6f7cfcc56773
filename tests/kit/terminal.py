"""Commands on a terminal: a pseudo-terminal, and the screen that a user would see (pyte)."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyte

from harness.servers import STALL_S

COLUMNS, ROWS = 100, 40


class Terminal:
    """A process on a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int):
        self.process = process
        self._master = master
        self._screen = pyte.HistoryScreen(COLUMNS, ROWS, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        # All that was on the screen at some time, for bars that come and go.
        self.seen: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65_536)
            except OSError:
                # The last process on the terminal has ended.
                return
            if not data:
                return
            with self._lock:
                self._stream.feed(data)
                self.seen.extend(self._lines())

    def _lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]

    @property
    def text(self) -> str:
        """What the screen shows now."""
        with self._lock:
            return "\n".join(self._lines())

    def type(self, text: bytes) -> None:
        """Presses keys; b"\\x03" is Ctrl-C."""
        os.write(self._master, text)

    def wait_for(self, part: str, within_s: float) -> None:
        """Returns once `part` is, or was, on the screen."""
        deadline = time.monotonic() + within_s + STALL_S
        while not any(part in line for line in list(self.seen)):
            assert time.monotonic() < deadline, f"{part!r} is not on the screen:\n{self.text}"
            time.sleep(0.02)

    def wait_for_last_line(self, line: str, within_s: float) -> None:
        """Returns once the last line of the screen is `line`."""
        deadline = time.monotonic() + within_s + STALL_S
        while self.text.splitlines()[-1:] != [line]:
            assert time.monotonic() < deadline, f"{line!r} is not the last line:\n{self.text}"
            time.sleep(0.02)

    def wait(self, within_s: float) -> int:
        """The exit code, once the process has ended and its output is read."""
        code = self.process.wait(within_s + STALL_S)
        self._reader.join(5)
        return code


@contextmanager
def on_terminal(command: Sequence[str], **options: Any) -> Iterator[Terminal]:
    """`command` on a terminal of `COLUMNS` columns; what is left of it is killed at the end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def take_terminal() -> None:
        # What runs the tests may ignore it, as a shell does for what it starts in the background.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal, **options
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
