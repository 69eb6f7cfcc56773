"""What a worker's processes wait for in a group, as `GET /weights` and the log name it."""

import logging
import time
from collections.abc import Sequence

from workers.weights.steps import Result

logger = logging.getLogger(__name__)

# The log names what is awaited when nothing has come for so long.
STALL_S = 5.0


class Awaited:
    """What is awaited now, and whether the log has it."""

    def __init__(self) -> None:
        # As `GET /weights` shows it; None: nothing.
        self.shown: Result | None = None
        self._since = 0.0
        self._is_logged = False

    def observe(self, waiting: Sequence[Result]) -> None:
        """Records what each process waits for (`Receiver.status`); logs each stall once."""
        found = awaited_by(waiting) if waiting else None
        if found != self.shown:
            self.shown, self._since, self._is_logged = found, time.monotonic(), False
        elif found and not self._is_logged and time.monotonic() - self._since >= STALL_S:
            self._is_logged = True
            logger.warning("nothing has come for %g s: %s", STALL_S, found["message"])

    @property
    def reason(self) -> str:
        """What was awaited, as an addition to a message about a deadline."""
        return f"; {self.shown['message']}" if self.shown else ""


def awaited_by(waiting: Sequence[Result]) -> Result:
    """What at least one process waits for, which is what the slowest of them waits for."""
    ranks = sorted(one["rank"] for one in waiting)
    who = f"{_named(ranks)} wait{'s' * (len(ranks) == 1)} for"
    joining = [one["missing_ranks"] for one in waiting if "missing_ranks" in one]
    if joining:
        missing = None if None in joining else sorted({rank for one in joining for rank in one})
        if missing is None:
            text = "the group, in NCCL, which does not tell the missing ranks"
        elif missing:
            text = f"{_named(missing)} to join the group"
        else:
            text = "the group, which all ranks have joined"
        return {"ranks": ranks, "missing_ranks": missing, "message": f"{who} {text}"}
    least = min(waiting, key=lambda one: one["bytes_received"])
    counts = {name: one for name, one in least.items() if name != "rank"}
    text = (
        f"{who} {least['tensor']}: {least['num_received']} of {least['num_announced']} "
        f"tensors have come, {least['bytes_received']} of {least['bytes_announced']} bytes"
    )
    return {"ranks": ranks, **counts, "message": text}


def _named(ranks: Sequence[int]) -> str:
    """E.g. `rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
