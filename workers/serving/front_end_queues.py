"""The queues of front ends, as a worker reaches them for a client's abort.

A front end knows no other one, but each knows all workers. So the call of one client reaches the
prompts that wait in any front end by way of a worker.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from titopool.wire.messages import EndedWaiting, EndWaiting

logger = logging.getLogger(__name__)

# How long an abort waits for a front end, which may have just died.
ANSWER_TIMEOUT_S = 2.0


@dataclass
class Call:
    """Front ends that have not answered, and how many jobs the others have ended."""

    missing: set[bytes]
    num_ended: int = 0
    has_all: asyncio.Event = field(default_factory=asyncio.Event)


class FrontEndQueues:
    """Ends prompts that wait in the queue of any front end."""

    def __init__(self, send_to_all: Callable[[EndWaiting], Collection[bytes]]):
        """`send_to_all` sends to every front end, and returns their identities."""
        self._send_to_all = send_to_all
        self._calls: dict[str, Call] = {}

    async def end_waiting(self, client_ids: list[str] | None) -> int:
        """Ends waiting jobs as aborted; returns how many there were at front ends that answered.

        Afterwards, jobs that these front ends had sent to this worker before have arrived. A front
        end that does not answer in time ends its jobs as soon as it runs again.

        Args:
            client_ids: the clients' ids of the requests; None: all.
        """
        name = uuid.uuid4().hex
        call = self._calls[name] = Call(set(self._send_to_all(EndWaiting(name, client_ids))))
        try:
            if call.missing:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await call.has_all.wait()
        except TimeoutError:
            logger.warning(
                "%d front ends did not answer within %g s; if they run, prompts in their queues end "
                "later",
                len(call.missing), ANSWER_TIMEOUT_S,
            )  # fmt: skip
        finally:
            del self._calls[name]
        return call.num_ended

    def on_ended(self, identity: bytes, answer: EndedWaiting) -> None:
        """Counts the answer of a front end; drops one that nobody waits for."""
        call = self._calls.get(answer.name)
        if call is None or identity not in call.missing:
            return
        call.missing.discard(identity)
        call.num_ended += answer.num_ended
        if not call.missing:
            call.has_all.set()
