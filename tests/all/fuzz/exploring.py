"""Runs hypothesis for a given time instead of a number of examples.

A test runs in batches. The seed of each batch is made of `FUZZ_SEED`, the test's name and the
batch's number. So the same seed gives the same examples in the same order, however many a machine
has time for.
"""

import os
import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck

# Seconds for all fuzz tests together.
SECONDS = float(os.environ.get("FUZZ_SECONDS") or 60)
_given = os.environ.get("FUZZ_SEED") or "0"
SEED = str(random.SystemRandom().getrandbits(32)) if _given == "random" else _given
# Shrinking an example takes at least as long again.
TIMEOUT_S = SECONDS + 900

hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
# Tests read the loaded profile when they are defined.
hypothesis.settings.load_profile("fuzz")


class ServerGone(BaseException):
    """A process of the server has ended or hangs.

    Not an Exception: hypothesis would try to shrink the example, and every example fails now.
    """


def explore(
    run: Callable[[], object],
    seeded: Any,
    *,
    name: str,
    share: float,
    between: Callable[[], None] = lambda: None,
) -> int:
    """Repeats `run` until `share` of the time has passed; returns the number of batches.

    Args:
        run: runs one batch.
        seeded: receives the seed: a test with `@given`, or a state machine.
        between: runs after each batch, and checks what must hold.
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
