"""What a worker's watchdog takes for a loop that stands, on a clock of the test's own and a real one."""

import threading
from collections.abc import Iterable
from itertools import chain, cycle, repeat
from types import SimpleNamespace

import pytest

from workers.serving import watchdog
from workers.serving.watchdog import Watchdog

INTERVAL_S, LIMIT_S = 0.5, 30.0
# A turn of the watchdog's thread: seconds from its start to the next, and of the process on CPUs.
# With a third value, the loop shows itself at the turn's end.
Turn = tuple[float, float] | tuple[float, float, bool]
PROMPT, STALLED, KEPT_OUT, SUSPENDED = (0.5, 0.0), (1.6, 0.1), (1.5, 1.4), (60.0, 0.1)


def end_of(monkeypatch: pytest.MonkeyPatch, turns: Iterable[Turn]) -> float | None:
    """After how many seconds a loop that shows itself in few of `turns` is ended, within them."""
    now = cpu_s = 0.0
    ends = list[float]()
    clock = SimpleNamespace(monotonic=lambda: now, process_time=lambda: cpu_s)
    monkeypatch.setattr(watchdog, "time", clock)
    found = Watchdog(
        INTERVAL_S,
        on_turn=lambda stood_s: None,
        limit_s=lambda: LIMIT_S,
        end=lambda reason, thread: ends.append(now),
    )
    found._loop_thread = 0
    found.loop_runs()
    coming = iter(turns)

    def wait(timeout_s: float) -> bool:
        nonlocal now, cpu_s
        turn_s, turn_cpu_s, *shows = next(coming, (0.0, 0.0))
        now, cpu_s = now + turn_s, cpu_s + turn_cpu_s
        if shows:
            found.loop_runs()
        return bool(ends) or not turn_s or now > 5 * LIMIT_S

    found._stopped = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    found._run()
    return ends[0] if ends else None


@pytest.mark.parametrize("turns, at_most_s", [
    (repeat(PROMPT), 31.5),
    # Calls that keep Python's lock.
    (repeat(KEPT_OUT), 32.5),
    # A machine that stalls for a second every eight seconds: that much is not held against the loop.
    (cycle([PROMPT] * 16 + [STALLED]), 35.0),
    # A process that was suspended while its loop stood.
    (chain(repeat(PROMPT, 30), [SUSPENDED], repeat(PROMPT)), 91.5),
    # A loop that went on after a suspension: the time that was lost then does not count later.
    (chain([SUSPENDED, (*PROMPT, True)], repeat(PROMPT)), 92.0),
], ids=["stands", "calls", "stalls", "suspended", "stands-later"])  # fmt: skip
def test_a_loop_that_stands_is_ended_but_for_the_time_that_was_lost(
    monkeypatch: pytest.MonkeyPatch, turns: Iterable[Turn], at_most_s: float
):
    ended = end_of(monkeypatch, turns)
    assert ended is not None
    assert at_most_s - 1.5 <= ended <= at_most_s


@pytest.mark.parametrize("turns", [
    [SUSPENDED], [*[PROMPT] * 50, SUSPENDED], [PROMPT, SUSPENDED, PROMPT, SUSPENDED, PROMPT],
])  # fmt: skip
def test_a_process_that_was_suspended_is_not_ended(
    monkeypatch: pytest.MonkeyPatch, turns: list[Turn]
):
    assert end_of(monkeypatch, turns) is None


@pytest.mark.parametrize("turns, longest_s", [
    # After a suspension, the loop's thread or the watchdog's runs first.
    ([(*SUSPENDED, True)], 0.0),
    ([(*SUSPENDED, False), (*PROMPT, True)], 0.0),
    # So much before it, or after it, is held against the loop.
    ([*[(*PROMPT, False)] * 10, (*SUSPENDED, True)], 4.5),
    ([(*SUSPENDED, False), *[(*PROMPT, False)] * 9, (*PROMPT, True)], 4.5),
    ([*[(*PROMPT, False)] * 10, (*PROMPT, True)], 5.0),
    ([(*KEPT_OUT, True)], 1.0),
])  # fmt: skip
def test_the_longest_that_a_loop_has_stood_is_without_suspensions(
    monkeypatch: pytest.MonkeyPatch, turns: list[tuple[float, float, bool]], longest_s: float
):
    now = cpu_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, process_time=lambda: cpu_s)
    monkeypatch.setattr(watchdog, "time", clock)
    found = Watchdog(INTERVAL_S, on_turn=lambda stood_s: None, limit_s=lambda: 600.0)
    found.loop_runs()
    coming = iter([*turns, (*PROMPT, True)])

    def wait(timeout_s: float) -> bool:
        nonlocal now, cpu_s
        turn_s, turn_cpu_s, loop_runs = next(coming, (0.0, 0.0, False))
        now, cpu_s = now + turn_s, cpu_s + turn_cpu_s
        if loop_runs:
            found.loop_runs()
        return not turn_s

    found._stopped = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    found._run()
    assert found.longest_s == pytest.approx(longest_s, abs=0.6)
    found.start_over()
    assert found.longest_s == 0.0


def test_a_loop_that_stands_is_ended_though_a_turn_fails():
    ended = threading.Event()

    def fail(stood_s: float) -> None:
        raise RuntimeError("staged")

    started = Watchdog(
        0.02, on_turn=fail, limit_s=lambda: 0.05, end=lambda reason, thread: ended.set()
    )
    started.start()
    assert ended.wait(10)
    started.stop()
