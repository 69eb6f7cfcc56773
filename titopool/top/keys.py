"""The keyboard of a terminal: single keys, without Enter and without an echo."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

# Sequences of xterm, and of its application mode.
SEQUENCES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down",
    "\x1b[5~": "page-up", "\x1b[6~": "page-down", "\x1b[3~": "delete",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home",
    "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end",
    "\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace",
    "\x03": "ctrl-c",
}  # fmt: skip
READ_BYTES = 64


def keys_in(text: str) -> Iterator[str]:
    """The keys of what a terminal has sent; unknown sequences are left out."""
    while text:
        known = next(
            (text[:length] for length in (4, 3, 1) if text[:length] in SEQUENCES), ""
        )  # fmt: skip
        if known == "\x1b" and len(text) > 1 and text[1] in "[O":
            # Up to its final letter or tilde.
            rest = text[2:].lstrip("0123456789;")
            text = rest[1:]
        elif known:
            yield SEQUENCES[known]
            text = text[len(known) :]
        else:
            if text[0].isprintable():
                yield text[0]
            text = text[1:]


@contextmanager
def keyboard() -> Iterator["Keyboard"]:
    """Within the block, keys arrive one by one; the terminal is set back afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor, termios.TCSANOW)
    # Output still needs its carriage returns.
    now = termios.tcgetattr(descriptor)
    now[1] = before[1]
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    try:
        yield Keyboard(descriptor, wake_read, wake_write)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        os.close(wake_read)
        os.close(wake_write)


class Keyboard:
    """Keys, and a way for other threads to end a wait for them."""

    def __init__(self, descriptor: int, wake_read: int, wake_write: int):
        self._descriptor, self._wake_read, self._wake_write = descriptor, wake_read, wake_write

    def wake(self) -> None:
        """Ends the wait; other threads may call it."""
        try:
            os.write(self._wake_write, b".")
        except OSError:
            # The pipe is full: the wait ends in any case; or it is closed: nobody waits.
            pass

    def read(self, timeout_s: float) -> list[str]:
        """The keys that were pressed, after `timeout_s` at most; "ctrl-c" if the terminal is gone."""
        ready, _, _ = select.select([self._descriptor, self._wake_read], [], [], timeout_s)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._descriptor not in ready:
            return []
        try:
            text = os.read(self._descriptor, READ_BYTES).decode(errors="ignore")
        except OSError:
            return ["ctrl-c"]
        return list(keys_in(text)) if text else ["ctrl-c"]
