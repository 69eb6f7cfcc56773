"""The CPU time of a parser: vLLM's run on text that a client can force, some in cubic time.

Runs in: the helpers that parse.
"""

import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

# CPU seconds of a completion's parsing: so many, and as many more for each token. Some of vLLM's parsers
# read a call again from its start at each letter: an honest one of 4 KiB takes them 2 s.
COMPLETION_S, TOKEN_S = 1.0, 0.002
# A completion that is parsed at once has `TOKEN_S` for each token up to `SHORT_S`, and then this much for
# each token besides: its helper takes nothing else meanwhile.
SHORT_S, WHOLE_TOKEN_S = 2.0, 0.00005
# Of one step of a stream's parser: the other streams of the helper wait for it.
STEP_S = 0.25
# A step that does not end by an exception ends its process, so much later.
GRACE_S = 1.0
# A parser may catch an exception, so it is raised again.
REPEAT_S = 0.05

Result = TypeVar("Result")


class TooDear(BaseException):
    """A parser takes more CPU time than it may. No `Exception`, which parsers catch."""


def limit_of_whole_s(num_tokens: int) -> float:
    """CPU seconds in which a completion that is parsed at once must be."""
    return COMPLETION_S + min(SHORT_S, TOKEN_S * num_tokens) + WHOLE_TOKEN_S * num_tokens


class CpuLimit:
    """Ends a call by an exception, or this process if the call does not return to Python."""

    def __init__(self) -> None:
        self._is_running = False
        # CPU seconds of the last call, and of all since the user set it to 0.
        self.took_s = self.spent_s = 0.0
        signal.signal(signal.SIGVTALRM, self._raise)

    def _raise(self, *_: Any) -> None:
        if self._is_running:
            raise TooDear

    def call(self, limit_s: float, parse: Callable[[], Result]) -> Result:
        """The result of `parse`; raises TooDear after `limit_s` seconds of CPU time, not once it is back."""
        began_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, limit_s + GRACE_S)
        try:
            try:
                self._is_running = True
                signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, REPEAT_S)
                return parse()
            finally:
                self._stop()
        finally:
            # The signal may have come within the line above; the next one is `REPEAT_S` away.
            self._stop()
            self.took_s = time.process_time() - began_s
            self.spent_s += self.took_s

    def _stop(self) -> None:
        self._is_running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
