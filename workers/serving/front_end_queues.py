"""Questions to all front ends, as a worker asks them for a client.

A front end knows no other one, but each knows all workers. So the call of one client reaches what is
in any front end, by way of a worker.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from titopool.wire.messages import EndedWaiting, EndWaiting, ListedRequests, ListRequests

logger = logging.getLogger(__name__)

# How long a question waits for a front end, which may have just died.
ANSWER_TIMEOUT_S = 2.0
LIST_TIMEOUT_S = 1.0

Question = EndWaiting | ListRequests
Answer = EndedWaiting | ListedRequests


class Ended(NamedTuple):
    """What `end_waiting` has ended."""

    num_jobs: int
    # Other ids of the requests that were meant.
    others: list[str]


class Listed(NamedTuple):
    """The requests in flight of the front ends that answered."""

    front_ends: list[ListedRequests]
    num_missing: int


@dataclass
class Call:
    """Front ends that have not answered, and the answers of the others."""

    missing: set[bytes]
    answers: list[Answer] = field(default_factory=list)
    has_all: asyncio.Event = field(default_factory=asyncio.Event)


class FrontEndQueues:
    """Asks all front ends, and gathers their answers."""

    def __init__(self, send_to_all: Callable[[Question], Collection[bytes]]):
        """`send_to_all` sends to every front end, and returns their identities."""
        self._send_to_all = send_to_all
        self._calls: dict[str, Call] = {}

    async def end_waiting(self, client_ids: list[str] | None) -> Ended:
        """Ends waiting jobs as aborted at all front ends that answer.

        Afterwards, jobs that these front ends had sent to this worker before have arrived. A front
        end that does not answer in time ends its jobs as soon as it runs again.

        Args:
            client_ids: the clients' ids of the requests; None: all.
        """
        call = await self._ask(lambda name: EndWaiting(name, client_ids), ANSWER_TIMEOUT_S)
        if call.missing:
            logger.warning(
                "%d front ends did not answer within %g s; if they run, prompts in their queues end "
                "later",
                len(call.missing), ANSWER_TIMEOUT_S,
            )  # fmt: skip
        ended = [one for one in call.answers if isinstance(one, EndedWaiting)]
        others = {name for one in ended for name in one.others}
        return Ended(sum(one.num_ended for one in ended), sorted(others))

    async def list_requests(self, limit: int) -> Listed:
        """The oldest requests in flight, at most `limit` of each front end that answers in time."""
        call = await self._ask(lambda name: ListRequests(name, limit), LIST_TIMEOUT_S)
        found = [one for one in call.answers if isinstance(one, ListedRequests)]
        return Listed(found, len(call.missing))

    async def _ask(self, question: Callable[[str], Question], timeout_s: float) -> Call:
        name = uuid.uuid4().hex
        call = self._calls[name] = Call(set(self._send_to_all(question(name))))
        try:
            if call.missing:
                async with asyncio.timeout(timeout_s):
                    await call.has_all.wait()
        except TimeoutError:
            pass
        finally:
            del self._calls[name]
        return call

    def on_answer(self, identity: bytes, answer: Answer) -> None:
        """Adds the answer of a front end; drops one that nobody waits for."""
        call = self._calls.get(answer.name)
        if call is None or identity not in call.missing:
            return
        call.missing.discard(identity)
        call.answers.append(answer)
        if not call.missing:
            call.has_all.set()
