"""Handles messages in their order, some steps in each turn of the event loop.

A message may start as many jobs as the engine has slots. Heartbeats are sent, and results are read,
between the turns.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice

logger = logging.getLogger(__name__)

# About 0.1 s of a core with the first steps of the jobs that are started.
STEPS_PER_TURN = 256


class Steps:
    """The steps of messages that have arrived."""

    def __init__(self) -> None:
        self._waiting: deque[Iterator[None]] = deque()
        self._is_planned = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, steps: Iterator[None]) -> None:
        """Adds the steps of a message; at once, if no other message's are left."""
        self._waiting.append(steps)
        if not self._is_planned:
            self._take_turn()

    def _take_turn(self) -> None:
        self._is_planned, num_left = False, STEPS_PER_TURN
        while self._waiting and num_left:
            steps = self._waiting[0]
            try:
                num_done = sum(1 for _ in islice(steps, num_left))
            except Exception:
                # Continue with the messages behind it.
                logger.exception("a message could not be handled")
                num_done = 0
            if num_done < num_left:
                self._waiting.popleft()
            num_left -= num_done
        if self._waiting:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._take_turn)
