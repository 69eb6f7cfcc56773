"""vLLM's outputs as completions: whole at the end, or in chunks while the job is streamed."""

import asyncio
import contextvars
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from titopool.wire.messages import Chunk, Completion, Job
from workers.engine.base import OnChunk, Slots
from workers.engine.outputs.packing import pack_experts, pack_logprobs, pack_mask, pack_since
from workers.engine.parsing.parsers import Parsed
from workers.engine.parsing.processes import ParsedJob
from workers.engine.sampling import failed_inside
from workers.engine.versions import History


class ChunkSender:
    """Sends the chunks of a job; what the client gets once goes with the first one."""

    def __init__(
        self, job: Job, on_chunk: Callable[[Chunk], None], adapter_version: int | None
    ) -> None:
        self._job, self._on_chunk, self._adapter_version = job, on_chunk, adapter_version
        # With images, until the first chunk: the expanded prompt, and offset and length of each.
        self.prompt_token_ids = b""
        self.image_ranges: Sequence[tuple[int, int]] = ()

    def send(self, pieces: list[tuple[int, Completion]], num_cached_tokens: int = 0) -> None:
        """Sends pieces of the job's completions, each with its index."""
        self._on_chunk(
            Chunk(
                self._job.job_id,
                self._job.attempt,
                pieces,
                num_cached_tokens,
                self.prompt_token_ids,
                adapter_version=self._adapter_version,
                image_ranges=list(self.image_ranges),
            )
        )
        self.prompt_token_ids, self.image_ranges = b"", ()


class Stream:
    """Cuts a streamed completion into `Chunk`s, as far as vLLM has made it."""

    def __init__(
        self,
        index: int,
        sender: ChunkSender,
        parsing: ParsedJob | None,
        history: Callable[[], History],
        replay_start: int | None,
    ):
        """To be made before vLLM gets the request, in the context of the job's task.

        Args:
            history: returns the request's weights up to now.
            replay_start: as in `RunContext`.
        """
        self._index, self._sender = index, sender
        self._replay_start = replay_start
        self._parsing = parsing
        self._history = history
        # Log lines of chunks name the request.
        self._context = contextvars.copy_context()
        self._num_characters = 0
        # Tokens that were sent, or are parsed before.
        self.num_sent = 0
        self._has_sent_last = asyncio.Event()

    @property
    def is_parsed(self) -> bool:
        """Whether vLLM's parsers read the tokens."""
        return self._parsing is not None

    def send_tokens(self, state: Any) -> None:
        """Sends what the completion, which goes on, has in addition to what was sent.

        Args:
            state: vLLM's RequestState of the completion.
        """
        self._context.run(self._send_tokens, state)

    def _send_tokens(self, state: Any) -> None:
        detokenizer = state.detokenizer
        new_ids = list(detokenizer.output_token_ids[self.num_sent :])
        text = detokenizer.get_next_output_text(False, True)
        piece = self._piece(new_ids, text, state.logprobs_processor.logprobs)
        self._send(piece, state.num_cached_tokens or 0)

    def send_last(self, output: Any) -> None:
        """Sends the rest of the completion, with vLLM's last RequestOutput of it."""
        (one,) = output.outputs
        # An error fails the whole job.
        if one.finish_reason == "error":
            self._has_sent_last.set()
            return
        new_ids, text = list(one.token_ids[self.num_sent :]), one.text[self._num_characters :]
        piece = self._piece(
            new_ids, text, one.logprobs, one.finish_reason or "", one.stop_reason,
            **replay_fields(one, self._replay_start),
        )  # fmt: skip
        self._send(piece, output.num_cached_tokens or 0)

    async def sent(self) -> None:
        """Returns once the last piece is sent, which may be parsed before."""
        await self._has_sent_last.wait()

    def _send(self, piece: Completion, num_cached_tokens: int) -> None:
        if self._parsing is None:
            self._sender.send([(self._index, piece)], num_cached_tokens)
            self._has_sent_last.set()
            return

        def send(parsed: Parsed) -> None:
            message, finish_reason = parsed
            one = msgspec.structs.replace(piece, message=message, finish_reason=finish_reason)
            try:
                self._sender.send([(self._index, one)], num_cached_tokens)
            finally:
                if finish_reason:
                    self._has_sent_last.set()

        self._parsing.parse(self._index, piece.text, piece.token_ids, piece.finish_reason, send)

    def _piece(
        self,
        new_ids: list[int],
        text: str,
        flat: Any,
        finish_reason: str = "",
        stop_reason: Any = None,
        **fields: Any,
    ) -> Completion:
        # The text may lag behind the tokens: vLLM holds back what may be part of a stop string.
        num_before = self.num_sent
        self.num_sent += len(new_ids)
        self._num_characters += len(text)
        ids = array("i", new_ids).tobytes()
        packed = None if flat is None else pack_since(flat, num_before, new_ids)
        history = self._history()
        return Completion(
            token_ids=ids,
            finish_reason=finish_reason,
            logprobs=packed,
            # Spans of all tokens so far: a reader of the last chunk needs no earlier ones.
            weight_versions=history.spans(self.num_sent),
            kv_from=history.kv_from(self.num_sent),
            text=text,
            stop_reason=stop_reason,
            **fields,
        )


@dataclass
class RunContext:
    """How one job runs: vLLM's parameters, and what reads its outputs."""

    # Of the first completion.
    params: Any
    on_chunk: OnChunk
    parsing: ParsedJob | None = None
    # None: the job is not streamed.
    sender: ChunkSender | None = None
    # Further arguments of AsyncLLM.generate.
    arguments: dict[str, Any] = field(default_factory=dict)
    # With images: the expanded prompt, once they are processed.
    prompt_token_ids: bytes = b""
    # The prompt token from which on routed experts are sent; None: neither they nor masks are.
    replay_start: int | None = None
    # Set once the prompt's log-probabilities are complete.
    is_scored: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def needs_scores(self) -> bool:
        """Whether the first completion brings the prompt's log-probabilities."""
        return self.params.prompt_logprobs is not None

    def stop(self, slots: Slots) -> None:
        """An abort: no further completion starts, but a prompt is scored first, and then goes on."""
        if self.is_scored.is_set() or not self.needs_scores:
            slots.stop()

    def add_images(self, prompt_token_ids: bytes, image_ranges: Sequence[tuple[int, int]]) -> None:
        """Takes the prompt whose images are processed."""
        self.prompt_token_ids = prompt_token_ids
        if self.sender is not None:
            self.sender.prompt_token_ids = prompt_token_ids
            self.sender.image_ranges = image_ranges

    def close(self) -> None:
        """The job has ended: nothing more is parsed."""
        if self.parsing is not None:
            self.parsing.close()

    async def completion(self, item: Any, history: History) -> Completion:
        """`item`, vLLM's CompletionOutput of a completion that has ended.

        Raises:
            TitopoolError: it failed inside the engine.
        """
        if item.finish_reason == "error":
            raise failed_inside(self.params, num_tokens=len(item.token_ids))
        ids = np.array(item.token_ids, dtype=np.int32).tobytes()
        message, finish_reason, packed = None, item.finish_reason, None
        if self.sender is None:
            if self.parsing is not None:
                message, finish_reason = await self.parsing.whole(
                    item.text, item.token_ids, finish_reason
                )
            if item.logprobs is not None:
                packed = pack_logprobs(item.logprobs, ids)
        return Completion(
            token_ids=ids,
            finish_reason=finish_reason,
            logprobs=packed,
            weight_versions=history.spans(len(item.token_ids)),
            kv_from=history.kv_from(len(item.token_ids)),
            text="" if self.sender else item.text,
            stop_reason=item.stop_reason,
            message=message,
            **replay_fields(item, None if self.sender else self.replay_start),
        )


def replay_fields(one: Any, start: int | None) -> dict[str, Any]:
    """What a trainer needs to replay `one`, a vLLM CompletionOutput, as fields of `Completion`.

    vLLM has it for completions that have ended.
    """
    if start is None:
        return {}
    return {
        "routed_experts": pack_experts(one.routed_experts, start),
        # vLLM 0.25.1 has no sampling masks.
        "sampling_mask": pack_mask(getattr(one, "sampling_mask", None)),
    }
