"""Passes a grammar on to the engine only after a trial; keeps the outcomes.

Runs in: each worker process, on its event loop.
"""

import asyncio
import hashlib
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from titopool.errors import InvalidRequest
from workers.engine.grammars.process import (
    MAX_MEMORY_BYTES,
    WALL_FACTOR,
    Outcome,
    Refused,
    decode_outcome,
    fork_process,
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
# From a worker's start of the process until it has read the tokenizer.
START_S = 60.0
# The process and its trials are killed together; a trial may end first.
END_S = 0.5


class Trial(NamedTuple):
    """An outcome, and the bytes that it counts for."""

    outcome: Outcome
    num_bytes: int


class GrammarTrials:
    """The process that tries grammars, and the outcomes of past trials."""

    def __init__(self, vllm_config: Any, limit_s: float):
        """`limit_s`: CPU time of each trial; 0: grammars are refused."""
        self._vllm_config = vllm_config
        self._limit_s = limit_s
        self._process: tuple[int, socket.socket] | None = None
        self._free = asyncio.Semaphore(NUM_TRIALS)
        # By digest of the grammar.
        self._trials: SharedCalls[Trial] = SharedCalls(
            MAX_CACHED_BYTES, lambda trial: trial.num_bytes
        )
        if limit_s:
            self._process = fork_process(vllm_config, limit_s)

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
            process = self._process
            try:
                reply = await self._ask(encoded)
            except OSError as error:
                if self._process is process:
                    logger.warning("the process that tries grammars is started again: %s", error)
                    self.close()
                    self._process = fork_process(self._vllm_config, self._limit_s)
                reply = await self._ask(encoded)
        return Trial(
            decode_outcome(reply) if reply else self._exceeds(), len(encoded) + ENTRY_BYTES
        )

    def _exceeds(self) -> Refused:
        return Refused(
            f"expected a grammar that is compiled within {self._limit_s:g} s of CPU time "
            f"(grammar_timeout_s) and {MAX_MEMORY_BYTES // 2**30} GiB of memory, got one that "
            "takes more; send a smaller grammar, or one with smaller counts"
        )

    async def _ask(self, encoded: bytes) -> bytes:
        """The outcome of a trial, encoded; empty if it exceeded a limit.

        Raises:
            OSError: the process has ended, or does not answer (a TimeoutError).
        """
        process = self._process
        assert process is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(process[1], [b"t"], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(encoded)
            writer.write_eof()
            timeout_s = START_S + (WALL_FACTOR + 1) * self._limit_s
            reply = await asyncio.wait_for(reader.read(), timeout_s)
        finally:
            writer.close()
        if not reply and (self._process is not process or await _ends(process[0])):
            raise ConnectionResetError("it ended during a trial")
        return reply

    def close(self) -> None:
        """Ends the process and its trials."""
        if self._process is not None:
            pid, control = self._process
            self._process = None
            control.close()
            with suppress(ProcessLookupError, ChildProcessError):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def refused(reason: str) -> InvalidRequest:
    """The error for a grammar."""
    return InvalidRequest(f"structured_outputs: {reason}", param="structured_outputs")


async def _ends(pid: int) -> bool:
    """Whether this child has ended or does so at once; its exit code is read."""
    deadline = time.monotonic() + END_S
    try:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
    except ChildProcessError:
        # The exit code was read by another trial's call.
        pass
    return True


def _restored(kind: Any, fields: dict[str, Any]) -> Any:
    """vLLM's StructuredOutputsParams with `fields`, also those that its constructor does not take."""
    public = {name: value for name, value in fields.items() if name[0] != "_"}
    structured = kind(**public)
    for name in fields.keys() - public.keys():
        setattr(structured, name, fields[name])
    return structured
