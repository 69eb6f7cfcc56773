"""How long front ends stand: turns of their event loops by the CPU clock of the loop's thread.

A machine that does other work makes no turn longer.
"""

import time
from pathlib import Path

# The variable with the file in which front ends that are forks note their turns.
VARIABLE = "NOTE_TURNS"
# Shorter turns are not noted.
NOTED_S = 0.01


def note_at(path: str) -> None:
    """Lets the front ends of this process note the turns of their loops in a file."""
    from app.gunicorn_worker import FrontEnd

    run = FrontEnd.run

    def run_with_notes(self: FrontEnd) -> None:
        watchers = _note(Path(path))
        run(self)
        del watchers

    FrontEnd.run = run_with_notes  # type: ignore[method-assign]


def _note(path: Path) -> list[object]:
    import gevent

    loop, began_s, file = gevent.get_hub().loop, time.thread_time(), path.open("a", buffering=1)

    def begin() -> None:
        nonlocal began_s
        began_s = time.thread_time()

    def end() -> None:
        if (took_s := time.thread_time() - began_s) > NOTED_S:
            file.write(f"{time.time()} {took_s}\n")

    after_poll, before_poll = loop.check(), loop.prepare()
    after_poll.start(begin)
    before_poll.start(end)
    return [after_poll, before_poll]


def longest_since(path: Path, at_s: float) -> float:
    """The longest noted turn since a time, in seconds; 0: none was noted."""
    if not path.exists():
        return 0.0
    turns = [line.split() for line in path.read_text().splitlines()]
    return max((float(took_s) for end_s, took_s in turns if float(end_s) >= at_s), default=0.0)
