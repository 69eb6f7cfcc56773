"""The memory that the requests of a front end may take together, counted before it is taken.

A request takes memory three times. Its body is refused where it does not fit. Before its jobs are
sent, it waits until what it expects of results fits: a part of the bytes that they may have at most, and
no more than a share of the budget, as most completions are much shorter than they may be. As results
arrive, they take what was expected, then what is free, then what younger requests have that got more
than they expected. The oldest request that runs takes what younger ones only expect, and what any wide
one of them has, so that one always goes on. Who gives way fails, and its client asks again.

Requests wait in order, but two eighths of the budget are for those that pass a wider one, one of them
for small ones. The first one goes on in any case once nobody else runs or is answered. An answer that
its client does not read is given up as soon as somebody waits for its memory.
"""

import fcntl
import logging
import os
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import gevent
from gevent.event import Event

from titopool.errors import AnswerTooLarge, QueueFull, TitopoolError

logger = logging.getLogger(__name__)

Fail = Callable[[TitopoolError], object]

# A request that takes less than this is small. An eighth of the budget is for small ones only, so
# that large bodies do not keep them out.
SMALL_BYTES = 2**20
SMALL_SHARE = 8
# Of the budget, what one request may expect of results: three wide ones run at once; and what is for
# those that pass others, so that a wide one that waits needs the end of two wide ones at most.
EXPECTED_SHARE, PASSING_SHARE = 4, 8
# A stream has less at once, and ends for no memory.
STREAM_BYTES = 64 * 1024
# How long a client may read nothing of its answer while others wait for memory.
UNREAD_S = 5.0
POLL_S = 0.02
# How often who waits looks whether its client has gone.
CHECK_CLIENT_S = 1.0
# How long an answer that is kept for repeats may wait for room while it is made.
GROW_S = 10.0


class Budget:
    """Bytes that requests have reserved in one front end."""

    def __init__(self, limit: int, count_unread: Callable[[], object] = lambda: None):
        """`count_unread` is called for each answer that is given up because nobody reads it."""
        self.limit = limit
        self.taken = 0
        self.taken_by_small = 0
        # Requests that wait for room; the first of them looks for it.
        self.queue: deque[Event] = deque()
        # What those that passed them expected.
        self.passing_bytes = 0
        # Those that have waited, until they are released, the oldest first.
        self.running: dict[Reservation, None] = {}
        # Those whose answer is being written.
        self.writing: set[Reservation] = set()
        self._count_unread = count_unread

    def end_unread(self) -> None:
        """Closes the connection of the client that does not read the largest answer, if there is one."""
        for one in sorted(self.writing, key=lambda one: -one.taken):
            if one.taken > SMALL_BYTES and one.unread_s > UNREAD_S:
                logger.warning(
                    "a client has not read its answer for %.1f s, and %d bytes of it are wanted: its "
                    "connection is closed", one.unread_s, one.taken,
                )  # fmt: skip
                self.writing.discard(one)
                self._count_unread()
                one.end_client()
                return


class Reservation:
    """The share of one request; `release` gives it back."""

    def __init__(self, budget: Budget, client: socket.socket | None = None):
        self._budget, self._client = budget, client
        self.taken = 0
        # Bytes of the request's body that have been read.
        self.num_body_bytes = 0
        self._is_released = False
        self._passing_bytes = 0
        # Of results: what they may still have at most, and what has arrived.
        self._bound = self._arrived = 0
        # Of that, what is reserved; and what was at first.
        self._expected = self._share = 0
        # Fails the request and frees its results at once; None: it does not wait for results.
        self._fail: Fail | None = None
        # Since when the client has read nothing (monotonic), and what it had not read then; None: no
        # piece of the answer waits for it.
        self._unread_since_s: float | None = None
        self._num_unread = 0

    def check(self, num_bytes: int) -> None:
        """Raises QueueFull unless `num_bytes` more fit into the budget.

        A request may take more than the budget while all others are small.
        """
        if not self._fits(num_bytes):
            raise self._refusal(num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        budget, wanted = self._budget, self.taken + num_bytes
        others = budget.taken - self.taken
        small = budget.taken_by_small - (self.taken if self.taken <= SMALL_BYTES else 0)
        if others == small or others + wanted <= budget.limit - budget.limit // SMALL_SHARE:
            return True
        return wanted <= SMALL_BYTES and small + wanted <= budget.limit // SMALL_SHARE

    def _refusal(self, num_bytes: int) -> QueueFull:
        wanted, others = self.taken + num_bytes, self._budget.taken - self.taken
        return QueueFull(
            f"expected requests that take at most {self._budget.limit} bytes of this front end "
            f"together (memory_budget_bytes), got one that takes {wanted} while others have {others}; "
            "retry later, or send fewer prompts in one request",
            retry_after_s=1,
        )

    def take(self, num_bytes: int) -> None:
        """Reserves `num_bytes` more; raises QueueFull as `check`."""
        self.check(num_bytes)
        self.add(num_bytes)

    def add(self, num_bytes: int) -> None:
        """Reserves `num_bytes` more, even beyond the budget; below 0: gives some back."""
        if self._is_released:
            return
        for size, sign in ((self.taken, -1), (self.taken + num_bytes, 1)):
            self._budget.taken += sign * size
            self._budget.taken_by_small += sign * size if size <= SMALL_BYTES else 0
        self.taken += num_bytes

    def keep(self, num_bytes: int) -> None:
        """Sets what is reserved to `num_bytes`, even beyond the budget; nothing after `release`."""
        self.add(num_bytes - self.taken)

    def release(self) -> None:
        """Gives all back; further calls do nothing."""
        self.keep(0)
        self._is_released = True
        self._budget.passing_bytes -= self._passing_bytes
        self._passing_bytes = 0
        self._budget.writing.discard(self)
        self._budget.running.pop(self, None)
        self._fail = None

    # ---- answers -----------------------------------------------------------------------

    def wait_for(self, num_bytes: int, left_s: float, check_client: Callable[[], object]) -> None:
        """Reserves `num_bytes` more, first come, first served, once there is room or nobody else runs.

        Args:
            check_client: raises an error if the client has gone.

        Raises:
            AnswerTooLarge: they never fit.
            QueueFull: there was no room for `left_s`.
        """
        budget = self._budget
        if num_bytes > budget.limit:
            raise self._too_large(num_bytes)
        if num_bytes > 0 and not (self._fits(num_bytes) and self._may_pass(num_bytes)):
            self._wait_in_turn(num_bytes, left_s, check_client)
        self.add(num_bytes)
        budget.running[self] = None

    def _wait_in_turn(
        self, num_bytes: int, left_s: float, check_client: Callable[[], object]
    ) -> None:
        budget = self._budget
        ends_s, turn = time.monotonic() + left_s, Event()
        budget.queue.append(turn)
        try:
            while budget.queue[0] is not turn:
                self._check_waiting(ends_s, num_bytes, check_client)
                turn.wait(CHECK_CLIENT_S)
            while budget.running and not self._fits(num_bytes):
                self._check_waiting(ends_s, num_bytes, check_client)
                budget.end_unread()
                gevent.sleep(POLL_S)
            # With nobody that runs, all that is taken may be that of requests behind this one.
        finally:
            budget.queue.remove(turn)
            if budget.queue:
                budget.queue[0].set()

    def _may_pass(self, num_bytes: int) -> bool:
        """Whether the request goes on before those that wait, and counts what it takes by that."""
        budget = self._budget
        # Small ones have a share of their own.
        is_small = self.taken + num_bytes <= SMALL_BYTES
        has_share = budget.taken_by_small + num_bytes <= budget.limit // SMALL_SHARE
        if not budget.queue or (is_small and has_share):
            return True
        if budget.passing_bytes + num_bytes > budget.limit // PASSING_SHARE:
            return False
        self._passing_bytes += num_bytes
        budget.passing_bytes += num_bytes
        return True

    def grow(self, num_bytes: int, left_s: float) -> bool:
        """Reserves `num_bytes` more of an answer once there is room, before those who wait: they may
        wait for what this request has. False: there was no room within `left_s`.

        The answer takes the place of the results, which are given up as it is made.
        """
        replaced = min(num_bytes, self._arrived)
        self._arrived -= replaced
        num_bytes -= replaced
        ends_s = time.monotonic() + min(left_s, GROW_S)
        while num_bytes > 0 and not self._fits(num_bytes):
            if time.monotonic() > ends_s:
                return False
            self._budget.end_unread()
            gevent.sleep(POLL_S)
        self.add(num_bytes)
        return True

    def _check_waiting(
        self, ends_s: float, num_bytes: int, check_client: Callable[[], object]
    ) -> None:
        check_client()
        if time.monotonic() > ends_s:
            raise self._refusal(num_bytes)

    def expect(
        self, bound: int, left_s: float, check_client: Callable[[], object], fail: Fail
    ) -> None:
        """Waits for room for results that have at most `bound` bytes; arguments as of `wait_for`.

        Args:
            fail: fails the request and frees its results at once.
        """
        expected = min(bound, self._budget.limit // EXPECTED_SHARE)
        self.wait_for(expected, left_s, check_client)
        self._bound, self._expected, self._share = bound, expected, expected
        self._fail = fail

    def settle(self) -> None:
        """All results have arrived."""
        self.add(-self._expected)
        self._bound = self._expected = 0
        self._fail = None

    def receive(self, num_bytes: int, bound: int = 0) -> TitopoolError | None:
        """Takes a result of `num_bytes` that arrived; below 0: one that was read.

        Args:
            bound: of this result, a part of what `expect` got.

        Returns:
            Why the result has no room.
        """
        share = self._budget.limit // EXPECTED_SHARE
        self._bound = max(0, self._bound - bound)
        self._arrived += num_bytes
        expected = min(self._bound, max(0, share - self._arrived), self._expected)
        more = num_bytes + expected - self._expected
        error: TitopoolError | None = None
        if self._arrived > self._budget.limit:
            error = self._too_large(self._arrived)
        elif more > 0 and self._arrived > STREAM_BYTES and not self._has_room(more):
            error = self._refusal(more)
        if error is None:
            self._expected = expected
            self.add(more)
        elif self._fail is not None:
            # The results that came before are freed with the request.
            self._forget(self._arrived - num_bytes)
        return error

    def _has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit, once younger requests have given way where that is enough."""
        if self._fits(num_bytes):
            return True
        budget = self._budget
        waiting = [one for one in budget.running if one._fail is not None]
        if self not in waiting:
            return False
        younger = waiting[: waiting.index(self) : -1]
        given = [one for one in younger if one._arrived > one._share]
        lacking = budget.taken + num_bytes - (budget.limit - budget.limit // SMALL_SHARE)
        if waiting[0] is self:
            given += [one for one in younger if one not in given and one.taken > SMALL_BYTES]
            for one in younger:
                # What they only expect, small ones too: they take what is free once it comes.
                part = min(one._expected, max(0, lacking))
                one._expected -= part
                one.add(-part)
                lacking -= part
        if lacking <= 0:
            return True
        for num, one in enumerate(given, 1):
            lacking -= one._arrived + one._expected
            if lacking <= 0:
                for other in given[:num]:
                    other._give_way()
                return True
        return False

    def _give_way(self) -> None:
        """Fails the request, whose results another one needs the room of."""
        fail, error = self._fail, self._refusal(0)
        assert fail is not None
        self._forget(self._arrived)
        fail(error)

    def _forget(self, num_bytes: int) -> None:
        """Gives results of `num_bytes` back, and those that were expected."""
        self.settle()
        self.add(-num_bytes)
        self._arrived = 0

    def _too_large(self, num_bytes: int) -> AnswerTooLarge:
        return AnswerTooLarge(
            f"expected an answer of at most {self._budget.limit} bytes (memory_budget_bytes), got "
            f"{num_bytes} or more; ask for fewer prompts, completions, tokens or log-probabilities in "
            "one request"
        )

    def begin_write(self) -> None:
        """The connection gets a piece of the answer."""
        self._unread_since_s, self._num_unread = time.monotonic(), sys.maxsize
        if not self._is_released:
            self._budget.writing.add(self)

    def end_write(self) -> None:
        """The client, or the system for it, has taken the piece."""
        self._unread_since_s = None

    @property
    def unread_s(self) -> float:
        """For how long the client has read nothing of its answer, as far as anybody has looked."""
        if self._unread_since_s is None:
            return 0.0
        # The system wakes who writes only once a third of its buffer is free: seconds, of a slow reader.
        num_unread = _num_unsent(self._client)
        if num_unread < self._num_unread:
            self._unread_since_s, self._num_unread = time.monotonic(), num_unread
        return time.monotonic() - self._unread_since_s

    def end_client(self) -> None:
        """Ends the connection, and with it the write that waits."""
        # The client may have been faster.
        with suppress(OSError):
            if self._client is not None:
                # Not of TLS's object, which who writes uses.
                with socket.socket(fileno=os.dup(self._client.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)


def _num_unsent(client: socket.socket | None) -> int:
    """Bytes that the system has for a client that has not got them."""
    if client is None:
        return 0
    try:
        found = fcntl.ioctl(client.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(found, sys.byteorder)
