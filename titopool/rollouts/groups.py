"""Groups of rollouts of which only the first to end are needed, and the end of the others."""

import asyncio
import copy
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from titopool.client.results import PromptResult
from titopool.client.sync_client import Client
from titopool.rollouts.rollout import Rollout

logger = logging.getLogger(__name__)

# Between an abort and its repeat, and of all repeats.
ABORT_INTERVAL_S = 0.05
ABORT_TIMEOUT_S = 60.0


class Groups:
    """The n rollouts of each prompt. The first groups to end are needed.

    A group with an error is needed only if all groups have ended and too few are without.

    Args:
        rollouts: prompt-major, n of each prompt.
        num_needed: of the groups.
    """

    def __init__(self, rollouts: Sequence[Rollout], n: int, num_needed: int):
        self._groups = [rollouts[start : start + n] for start in range(0, len(rollouts), n)]
        self._num_playing = [n] * len(self._groups)
        self._num_needed = num_needed
        # The groups that have ended without an error, in the order in which they did.
        self._ended: list[int] = []

    def are_enough(self, ended: Rollout) -> bool:
        """Whether the rest is not needed, now that another rollout has ended."""
        assert ended.prompt_index is not None
        self._num_playing[ended.prompt_index] -= 1
        if not self._num_playing[ended.prompt_index] and not any(
            one.error for one in self._groups[ended.prompt_index]
        ):
            self._ended.append(ended.prompt_index)
        return len(self._ended) == self._num_needed

    def split(self) -> tuple[list[Rollout], list[Rollout]]:
        """The rollouts of the groups that are needed, and the others; both prompt-major."""
        ended = set(self._ended)
        others = [index for index in range(len(self._groups)) if index not in ended]
        chosen = set((self._ended + others)[: self._num_needed])
        rollouts = [one for group in self._groups for one in group]
        return (
            [one for one in rollouts if one.prompt_index in chosen],
            [one for one in rollouts if one.prompt_index not in chosen],
        )


class StoppableClient:
    """The client of one rollout. Its generation can be stopped for good, from another thread."""

    def __init__(self, client: Client):
        self._client = client
        self._lock = threading.Lock()
        self._is_stopped = False
        # Of requests in flight. The caller may have given several the same id.
        self._request_ids: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what a pickle gives, is one of the client alone: no run stops it."""
        return copy.copy, (self._client,)

    def generate(
        self, prompts: Any, *, request_id: str | None = None, **options: Any
    ) -> Sequence[PromptResult]:
        """As the client's.

        Raises:
            asyncio.CancelledError: it was stopped. No Exception, so that neither tools nor an
                environment take it for an answer.
        """
        request_id = request_id or uuid.uuid4().hex
        with self._lock:
            self._check()
            self._request_ids.append(request_id)
        try:
            results = self._client.generate(prompts, request_id=request_id, **options)
        finally:
            with self._lock:
                self._request_ids.remove(request_id)
        self._check()
        return results

    def stop(self) -> list[str]:
        """Sends no more requests; returns the ids of those in flight."""
        with self._lock:
            self._is_stopped = True
            return list(self._request_ids)

    def _check(self) -> None:
        if self._is_stopped:
            raise asyncio.CancelledError("the rollout is not needed any more")


def stop(rollouts: Sequence[Rollout]) -> list[str]:
    """No rollout with a StoppableClient sends a further request; returns the ids of those in flight."""
    clients: list[Any] = [one.client for one in rollouts]
    stoppable = [one for one in clients if isinstance(one, StoppableClient)]
    return [request_id for each in stoppable for request_id in each.stop()]


def abort(client: Client, rollouts: Sequence[Rollout]) -> None:
    """Ends rollouts with a StoppableClient; returns when none of their requests is in flight.

    Where that takes more than `ABORT_TIMEOUT_S`, or an abort fails, it returns with a warning: the
    needed rollouts are complete, and worth more than an error.
    """
    if not stop(rollouts):
        return
    # A call of the client may take longer than the deadline.
    thread = threading.Thread(target=_abort_all, args=(client, rollouts), daemon=True)
    thread.start()
    thread.join(ABORT_TIMEOUT_S)
    if left := stop(rollouts):
        logger.warning(
            "%d requests of rollouts that are not needed go on to their end: they did not end within "
            "%g s, or their abort failed",
            len(left), ABORT_TIMEOUT_S,
        )  # fmt: skip


def _abort_all(client: Client, rollouts: Sequence[Rollout]) -> None:
    deadline = time.monotonic() + ABORT_TIMEOUT_S
    while (request_ids := stop(rollouts)) and time.monotonic() < deadline:
        try:
            client.abort(request_ids)
        except Exception as error:
            logger.warning("the abort of %d requests failed: %s", len(request_ids), error)
            return
        # A request that the server got after the abort is in the next one.
        time.sleep(ABORT_INTERVAL_S)
