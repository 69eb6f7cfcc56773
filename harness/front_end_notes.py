"""What front ends note of themselves: turns of their event loops, and what their budgets say.

A turn is measured by the CPU clock of the loop's thread, so a machine that does other work makes none
longer. A budget is read at the end of each turn; through heartbeats it is known a second later.
"""

import time
from pathlib import Path
from typing import Any

# The variable with the file in which front ends that are forks write their notes.
VARIABLE = "FRONT_END_NOTES"
# Shorter turns are not noted, unless the budget says more than it ever has.
NOTED_S = 0.01


def note_at(path: str) -> None:
    """Lets the front ends of this process write notes to a file."""
    from app.gunicorn_worker import FrontEnd

    run = FrontEnd.run

    def run_with_notes(self: FrontEnd) -> None:
        watchers = _note(Path(path), self.wsgi.extensions["titopool"].budget)
        run(self)
        del watchers

    FrontEnd.run = run_with_notes  # type: ignore[method-assign]


def _note(path: Path, budget: Any) -> list[object]:
    import gevent

    loop, began_s, file = gevent.get_hub().loop, time.thread_time(), path.open("a", buffering=1)
    most_taken = 0

    def begin() -> None:
        nonlocal began_s
        began_s = time.thread_time()

    def end() -> None:
        nonlocal most_taken
        took_s, taken = time.thread_time() - began_s, budget.taken
        if took_s > NOTED_S or taken > most_taken:
            most_taken = max(most_taken, taken)
            file.write(f"{time.time()} {took_s} {taken}\n")

    after_poll, before_poll = loop.check(), loop.prepare()
    after_poll.start(begin)
    before_poll.start(end)
    return [after_poll, before_poll]


def longest_since(path: Path, at_s: float) -> float:
    """The longest turn since a time, in seconds, if one was longer than `NOTED_S`."""
    return max((took_s for took_s, _ in _since(path, at_s)), default=0.0)


def most_taken_since(path: Path, at_s: float) -> float:
    """The most bytes of the budget since a time. Lower peaks than earlier ones are not noted."""
    return max((taken for _, taken in _since(path, at_s)), default=0.0)


def _since(path: Path, at_s: float) -> list[tuple[float, float]]:
    """Seconds of turns, and bytes of the budget."""
    if not path.exists():
        return []
    notes = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
    return [(took_s, taken) for end_s, took_s, taken in notes if end_s >= at_s]
