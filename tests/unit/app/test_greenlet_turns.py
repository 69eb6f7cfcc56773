"""Long lists of log-probabilities leave other greenlets their turns."""

import itertools

import gevent
import numpy as np
import pytest

from app import time_slices
from app.call.openai_logprobs import of_ids, of_prompt, positions
from titopool.wire.messages import Completed, Completion, Logprobs

NUM_TOKENS = 2001
IDS = np.arange(NUM_TOKENS, dtype=np.int32)


def completion() -> Completion:
    values = np.zeros(NUM_TOKENS, np.float32).tobytes()
    return Completion(IDS.tobytes(), "length", Logprobs(values), [])


def prompt() -> Completed:
    number = NUM_TOKENS - 1
    values, ones = np.zeros(number, np.float32).tobytes(), np.ones(number, np.int32).tobytes()
    return Completed(1, 1, [], 0, prompt_logprobs=Logprobs(values, ones, ranks=ones))


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(positions(completion())),
        lambda: list(of_ids(completion(), 0)["content"]),
        lambda: list(of_prompt(prompt(), IDS, "prompt", 0, None)),
    ],
    ids=["positions", "of_ids", "of_prompt"],
)
def test_other_greenlets_may_run_after_each_position(make, monkeypatch: pytest.MonkeyPatch):
    sleeps: list[float] = []
    monkeypatch.setattr(gevent, "sleep", sleeps.append)
    monkeypatch.setattr(time_slices, "SLICE_S", -1.0)
    assert len(make()) == NUM_TOKENS
    # The first token of a prompt has no log-probabilities.
    assert len(sleeps) >= NUM_TOKENS - 1
    # After a sleep of 0 s, no socket is read.
    assert all(one > 0 for one in sleeps)


def test_work_that_cannot_pause_takes_turns_of_its_own():
    """Between two such pieces of work, the event loop comes round."""
    seen: list[str] = []
    # The tests before may have kept the loop's time standing, and the timeout below with it.
    gevent.get_hub().loop.update_now()

    def work() -> None:
        time_slices.give_way_before(2 * time_slices.LONG_BYTES)
        seen.append("work")

    def look() -> None:
        while seen.count("work") < 8:
            gevent.sleep(time_slices.YIELD_S)
            seen.append("look")

    gevent.joinall([gevent.spawn(look), *(gevent.spawn(work) for _ in range(8))], timeout=60)
    assert seen.count("work") == 8
    # The two who sleep for as long may wake in either order: once, not seven times.
    assert list(itertools.pairwise(seen)).count(("work", "work")) <= 1
    # Short work does not wait.
    before = seen.copy()
    time_slices.give_way_before(time_slices.LONG_BYTES)
    assert seen == before
