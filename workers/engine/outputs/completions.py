"""vLLM's outputs of a job as completions: whole at its end, or in chunks while it is streamed."""

import asyncio
import contextvars
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from titopool.wire.messages import Chunk, Completion, Job
from workers.engine.outputs.packing import pack_experts, pack_logprobs, pack_mask, pack_since
from workers.engine.parsing import Parsing
from workers.engine.sampling import failed_inside
from workers.engine.versions import History


class Sent(NamedTuple):
    """How much of a completion has been sent."""

    num_tokens: int = 0
    num_characters: int = 0


class Stream:
    """Cuts a job's completions into `Chunk`s, as far as vLLM has made them."""

    def __init__(
        self,
        job: Job,
        parsing: Parsing | None,
        on_chunk: Callable[[Chunk], None],
        adapter_version: int | None,
        replay_start: int | None,
    ):
        """`replay_start`: as in `RunContext`."""
        self._job = job
        self._replay_start = replay_start
        self._parsing = parsing
        self._on_chunk = on_chunk
        self._adapter_version = adapter_version
        self._sent: dict[int, Sent] = {}

    def begin(
        self,
        history: Callable[[], History],
        prompt_token_ids: bytes,
        image_ranges: Sequence[tuple[int, int]],
    ) -> None:
        """To be called before vLLM gets the request.

        Args:
            history: returns the request's weights up to now.
            prompt_token_ids: with images, the expanded prompt, which goes with the first chunk.
            image_ranges: with images, offset and length of each, which go with the first chunk.
        """
        self._history = history
        # Log lines of chunks name the request.
        self._context = contextvars.copy_context()
        self._prompt_token_ids, self._image_ranges = prompt_token_ids, image_ranges

    @property
    def num_completions(self) -> int:
        return self._job.num_sequences

    @property
    def is_parsed(self) -> bool:
        """Whether vLLM's parsers read the tokens."""
        return self._parsing is not None

    def num_sent(self, index: int) -> int:
        """Tokens of completion `index` that were sent."""
        sent = self._sent.get(index)
        return sent.num_tokens if sent is not None else 0

    def send_tokens(self, state: Any) -> None:
        """Sends what a completion that goes on has in addition to what was sent.

        Args:
            state: vLLM's RequestState of the completion.
        """
        self._context.run(self._send_tokens, state)

    def _send_tokens(self, state: Any) -> None:
        index, detokenizer = state.request_index, state.detokenizer
        sent = self._sent.get(index, Sent())
        new_ids = list(detokenizer.output_token_ids[sent.num_tokens :])
        text = detokenizer.get_next_output_text(False, True)
        piece = self._piece(index, sent, new_ids, text, state.logprobs_processor.logprobs)
        self._send([(index, piece)], state.num_cached_tokens)

    def send_last(self, output: Any) -> None:
        """Sends the rest of the completions in `output`, vLLM's RequestOutput, which have ended."""
        pieces = []
        for one in output.outputs:
            # An error fails the whole job.
            if one.finish_reason == "error":
                continue
            sent = self._sent.get(one.index, Sent())
            new_ids, text = list(one.token_ids[sent.num_tokens :]), one.text[sent.num_characters :]
            piece = self._piece(
                one.index, sent, new_ids, text, one.logprobs, one.finish_reason or "",
                one.stop_reason, **replay_fields(one, self._replay_start),
            )  # fmt: skip
            pieces.append((one.index, piece))
        if pieces:
            self._send(pieces, output.num_cached_tokens)

    def _send(self, pieces: list[tuple[int, Completion]], num_cached_tokens: int | None) -> None:
        self._on_chunk(
            Chunk(
                self._job.job_id,
                self._job.attempt,
                pieces,
                num_cached_tokens or 0,
                self._prompt_token_ids,
                adapter_version=self._adapter_version,
                image_ranges=list(self._image_ranges),
            )
        )
        # They go with the first chunk only.
        self._prompt_token_ids, self._image_ranges = b"", ()

    def _piece(
        self,
        index: int,
        sent: Sent,
        new_ids: list[int],
        text: str,
        flat: Any,
        finish_reason: str = "",
        stop_reason: Any = None,
        **fields: Any,
    ) -> Completion:
        # The text may lag behind the tokens: vLLM holds back what may be part of a stop string.
        now = Sent(sent.num_tokens + len(new_ids), sent.num_characters + len(text))
        self._sent[index] = now
        ids = array("i", new_ids).tobytes()
        packed = None if flat is None else pack_since(flat, sent.num_tokens, new_ids)
        message = None
        if self._parsing is not None:
            message, finish_reason = self._parsing.delta(index, text, new_ids, finish_reason)
        return Completion(
            token_ids=ids,
            finish_reason=finish_reason,
            logprobs=packed,
            # Spans of all tokens so far: a reader of the last chunk needs no earlier ones.
            weight_versions=self._history().spans(index, now.num_tokens),
            text=text,
            stop_reason=stop_reason,
            message=message,
            **fields,
        )


@dataclass
class RunContext:
    """How one job runs: vLLM's parameters, and what reads its outputs."""

    params: Any
    parsing: Parsing | None = None
    stream: Stream | None = None
    # Further arguments of AsyncLLM.generate.
    arguments: dict[str, Any] = field(default_factory=dict)
    # With images: the expanded prompt and the images' ranges in it, once they are processed.
    prompt_token_ids: bytes = b""
    image_ranges: Sequence[tuple[int, int]] = ()
    # The prompt token from which on routed experts are sent; None: neither they nor masks are.
    replay_start: int | None = None

    async def completions(self, output: Any, history: History) -> list[Completion]:
        """The completions of `output`, vLLM's last RequestOutput.

        Raises:
            TitopoolError: one failed inside the engine.
        """
        completions = []
        for item in output.outputs:
            if item.finish_reason == "error":
                raise failed_inside(self.params, num_tokens=len(item.token_ids))
            ids = np.array(item.token_ids, dtype=np.int32).tobytes()
            message, finish_reason, packed = None, item.finish_reason, None
            if self.stream is None:
                if self.parsing is not None:
                    message, finish_reason = self.parsing.whole(item)
                    # Parsing a long text blocks the loop: let other tasks run in between.
                    await asyncio.sleep(0)
                if item.logprobs is not None:
                    packed = pack_logprobs(item.logprobs, ids)
            completions.append(
                Completion(
                    token_ids=ids,
                    finish_reason=finish_reason,
                    logprobs=packed,
                    weight_versions=history.spans(item.index, len(item.token_ids)),
                    text="" if self.stream else item.text,
                    stop_reason=item.stop_reason,
                    message=message,
                    **replay_fields(item, None if self.stream else self.replay_start),
                )
            )
        return completions


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
