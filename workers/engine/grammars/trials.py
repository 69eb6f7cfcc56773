"""Passes a grammar on to the engine only after a trial; keeps the outcomes.

Runs in: each worker process, on its event loop.
"""

import asyncio
import hashlib
import logging
from typing import Any, NamedTuple

import msgspec

from titopool.errors import InvalidRequest
from titopool.helpers.fork_server import ForkServer
from titopool.helpers.helper import Helper
from workers.engine.grammars.process import (
    MAX_MEMORY_BYTES,
    Outcome,
    Refused,
    decode_outcome,
    limits_of,
    work_of,
)
from workers.shared_calls import SharedCalls

logger = logging.getLogger(__name__)

# Trials at once, at low priority; xgrammar compiles with up to 8 threads.
NUM_TRIALS = 4
# Of one grammar. Clients' have 64 KiB; vLLM's parsers make larger ones from the tools of a chat.
MAX_BYTES = 1024 * 1024
# Of the outcomes that are kept, each with what its objects take besides the grammar.
MAX_CACHED_BYTES = 16 * 2**20
ENTRY_BYTES = 4096
# A trial that waits for a core may take so many times its CPU time.
WALL_FACTOR = 3


class Trial(NamedTuple):
    """An outcome, and the bytes that it counts for."""

    outcome: Outcome
    num_bytes: int


class GrammarTrials:
    """The process that tries grammars, and the outcomes of past trials."""

    def __init__(self, vllm_config: Any, limit_s: float):
        """`limit_s`: CPU time of each trial; 0: grammars are refused."""
        self._limit_s = limit_s
        self._server: ForkServer | None = None
        self._free = asyncio.Semaphore(NUM_TRIALS)
        # By digest of the grammar.
        self._trials: SharedCalls[Trial] = SharedCalls(
            MAX_CACHED_BYTES, lambda trial: trial.num_bytes
        )
        if limit_s:
            self._server = ForkServer(
                "titopool::grammars", lambda: work_of(vllm_config), limits_of(limit_s)
            )

    async def check(self, params: Any) -> None:
        """Tries the grammar of `params`, vLLM's SamplingParams, unless it has passed before.

        Then its `structured_outputs` are what vLLM's checks made of them.

        Raises:
            InvalidRequest: vLLM refuses the grammar, it exceeds a limit, or this server takes none.
            OSError: the process that tries grammars has ended, also after a new start.
        """
        structured = params.structured_outputs
        # vLLM's checks set the backend.
        if structured is None or structured._backend:
            return
        if not self._limit_s:
            raise refused(
                "expected none, as this server takes no grammars (grammar_timeout_s is 0)"
            )
        fields = {name: value for name, value in vars(structured).items() if name[0] != "_"}
        encoded = msgspec.msgpack.encode(fields)
        if len(encoded) > MAX_BYTES:
            raise refused(
                f"expected at most {MAX_BYTES} bytes, got {len(encoded)}; send fewer tools"
            )
        digest = hashlib.sha256(encoded).digest()
        trial, _ = await self._trials.outcome(digest, lambda: self._try(encoded))
        if isinstance(trial.outcome, Refused):
            raise refused(trial.outcome.reason)
        params.structured_outputs = _restored(type(structured), trial.outcome.fields)

    async def _try(self, encoded: bytes) -> Trial:
        async with self._free:
            reply = await self._ask(encoded)
            if reply is None:
                reply = await self._ask(encoded)
        if reply is None:
            raise ConnectionResetError("the process that tries grammars ended during two trials")
        return Trial(
            decode_outcome(reply) if reply else self._exceeds(), len(encoded) + ENTRY_BYTES
        )

    def _exceeds(self) -> Refused:
        return Refused(
            f"expected a grammar that is compiled within {self._limit_s:g} s of CPU time "
            f"(grammar_timeout_s) and {MAX_MEMORY_BYTES // 2**30} GiB of memory, got one that "
            "takes more; send a smaller grammar, or one with smaller counts"
        )

    async def _ask(self, encoded: bytes) -> bytes | None:
        """The outcome of a trial, encoded; empty if it exceeded a limit, None if it was lost."""
        server = self._server
        assert server is not None
        helper, pid = Helper(server), server.pid
        try:
            reply = await helper.call_async(encoded, WALL_FACTOR * self._limit_s)
        except TimeoutError:
            return b""
        except ConnectionError:
            return None if await server.ends(pid) else b""
        finally:
            helper.end()
        assert isinstance(reply, bytes)
        return reply

    def close(self) -> None:
        """Ends the process and its trials."""
        if self._server is not None:
            self._server.close()


def refused(reason: str) -> InvalidRequest:
    """The error for a grammar."""
    return InvalidRequest(f"structured_outputs: {reason}", param="structured_outputs")


def _restored(kind: Any, fields: dict[str, Any]) -> Any:
    """vLLM's StructuredOutputsParams with `fields`, also those that its constructor does not take."""
    public = {name: value for name, value in fields.items() if name[0] != "_"}
    structured = kind(**public)
    for name in fields.keys() - public.keys():
        setattr(structured, name, fields[name])
    return structured
