"""Prompts that are scored: their log-probabilities are there as a whole, or nothing is.

vLLM hands over those of a prompt when its last chunk is done. An abort before that, by a weight
update or a pause, leaves none of them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from titopool.errors import DeadlinePassed

# Before a prompt is scored again: an engine that is shutting down aborts it at once.
PAUSE_S = 0.05

Scored = TypeVar("Scored")


class NotScored(Exception):
    """The prompt was aborted before its log-probabilities were there."""


def check_scored(output: Any) -> None:
    """Raises NotScored unless `output`, a vLLM RequestOutput, has them for the whole prompt."""
    # The first token has a position without entries.
    if len(output.prompt_logprobs) < len(output.prompt_token_ids):
        raise NotScored


async def until_scored(run: Callable[[], Awaitable[Scored]], timeout_s: float) -> Scored:
    """What `run` gives, which is called again when it raises NotScored.

    Nobody has seen a part of what was aborted. While the engine stands, a new call waits in it.

    Raises:
        DeadlinePassed: it was aborted again and again for `timeout_s`.
    """
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            return await run()
        except NotScored:
            if time.monotonic() > give_up:
                raise DeadlinePassed(
                    f"weight updates or pauses aborted the prompt again and again for {timeout_s:g} s "
                    "(request_timeout_s), each time before it was scored; send it when there are "
                    "fewer of them, or use another policy for them"
                ) from None
        await asyncio.sleep(PAUSE_S)
