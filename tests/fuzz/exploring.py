"""Runs hypothesis for a time instead of a number of examples.

A test is run in batches, each with a seed of its own that is made of `FUZZ_SEED`, the test's name
and the batch's number: the same seed gives the same examples in the same order, however many of
them a machine has time for.
"""

import os
import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck

# Of all parts together.
SECONDS = float(os.environ.get("FUZZ_SECONDS") or 60)
_given = os.environ.get("FUZZ_SEED") or "0"
SEED = str(random.SystemRandom().getrandbits(32)) if _given == "random" else _given
# Shrinking an example takes as long again, and more.
TIMEOUT_S = SECONDS + 900

hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
# Tests take what is loaded when they are made.
hypothesis.settings.load_profile("fuzz")


class ServerGone(BaseException):
    """A process of the server has ended or hangs.

    No Exception: hypothesis would go on and look for a smaller example, and every one fails now.
    """


def explore(
    run: Callable[[], object],
    seeded: Any,
    *,
    name: str,
    share: float,
    between: Callable[[], None] = lambda: None,
) -> int:
    """Repeats `run` until `share` of the time has passed; returns how many batches there were.

    Args:
        run: runs one batch.
        seeded: what takes the seed, a test with `@given` or a state machine.
        between: what must hold after each batch.
    """
    end = time.monotonic() + share * SECONDS
    num_batches = 0
    try:
        while num_batches == 0 or time.monotonic() < end:
            hypothesis.seed(f"{SEED}/{name}/{num_batches}")(seeded)
            run()
            between()
            num_batches += 1
    except BaseException:
        print(f"\n{name}: failed in batch {num_batches} of SEED={SEED}")
        raise
    print(f"\n{name}: {num_batches} batches, SEED={SEED}")
    return num_batches
