"""Retries jobs whose prompts are scored, when an abort comes before the scores are complete.

vLLM returns a prompt's log-probabilities when the last chunk of its prefill is done. An abort before
that, by a weight update or a pause, returns none.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from titopool.errors import DeadlinePassed

# Interval between tries: an engine that shuts down aborts each of them at once.
RETRY_INTERVAL_S = 0.05

Scored = TypeVar("Scored")


class NotScored(Exception):
    """The prompt was aborted before its log-probabilities were complete."""


def check_scored(output: Any) -> None:
    """Raises NotScored unless `output`, a vLLM RequestOutput, has all of the prompt's positions."""
    # The first token's position counts, though it has no entries.
    if len(output.prompt_logprobs) < len(output.prompt_token_ids):
        raise NotScored


async def until_scored(run: Callable[[], Awaitable[Scored]], timeout_s: float) -> Scored:
    """The result of `run`, which is called again while it raises NotScored.

    No client has seen a part of an aborted run. While generation is paused, vLLM holds the next call.

    Raises:
        DeadlinePassed: aborts came before the scores for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await run()
        except NotScored:
            if time.monotonic() > deadline:
                raise DeadlinePassed(
                    f"expected the prompt's log-probabilities within {timeout_s:g} s (request_timeout_s), "
                    "but weight updates or pauses aborted each try; send the prompt again when there are "
                    "fewer of them, or choose another pause mode for them"
                ) from None
        await asyncio.sleep(RETRY_INTERVAL_S)
