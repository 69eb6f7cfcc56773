"""vLLM's outputs of a job as completions: whole at its end, or in chunks while it is streamed."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from titopool.wire.messages import Chunk, Completion, Job
from workers.engine.packing import flat_since, pack_experts, pack_logprobs, pack_mask
from workers.engine.parsing import Parsing
from workers.engine.sampling import failed_inside
from workers.engine.versions import History


class Sent(NamedTuple):
    """How much of a completion has been sent."""

    num_tokens: int = 0
    num_characters: int = 0


class Stream:
    """Cuts vLLM's cumulative outputs into a job's `Chunk`s."""

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

    def send_new(
        self,
        output: Any,
        prompt_token_ids: bytes,
        image_ranges: Sequence[tuple[int, int]],
        history: History,
    ) -> None:
        """Sends what `output`, a vLLM RequestOutput, has in addition to the previous one.

        Args:
            prompt_token_ids: with images, the expanded prompt, which goes with the first chunk.
            image_ranges: with images, offset and length of each, which go with the first chunk.
            history: the request's weights up to now.
        """
        is_first = not self._sent
        pieces = [
            (one.index, self._new_piece(one, history))
            for one in output.outputs
            # An error fails the whole job.
            if one.finish_reason != "error"
        ]
        if pieces:
            self._on_chunk(
                Chunk(
                    self._job.job_id,
                    self._job.attempt,
                    pieces,
                    output.num_cached_tokens or 0,
                    prompt_token_ids if is_first else b"",
                    adapter_version=self._adapter_version,
                    image_ranges=list(image_ranges) if is_first else [],
                )
            )

    def _new_piece(self, one: Any, history: History) -> Completion:
        sent = self._sent.get(one.index, Sent())
        # The text may lag behind the tokens: vLLM holds back what may be part of a stop string.
        self._sent[one.index] = Sent(len(one.token_ids), max(sent.num_characters, len(one.text)))
        new_ids = list(one.token_ids[sent.num_tokens :])
        ids = np.array(new_ids, dtype=np.int32).tobytes()
        text = one.text[sent.num_characters :]
        packed, message, finish_reason = None, None, one.finish_reason or ""
        if one.logprobs is not None:
            packed = pack_logprobs(flat_since(one.logprobs, sent.num_tokens), ids)
        if self._parsing is not None:
            message, finish_reason = self._parsing.delta(one.index, text, new_ids, finish_reason)
        return Completion(
            token_ids=ids,
            finish_reason=finish_reason,
            logprobs=packed,
            # Spans of all tokens so far: a reader of the last chunk needs no earlier ones.
            weight_versions=history.spans(one.index, len(one.token_ids)),
            text=text,
            stop_reason=one.stop_reason,
            message=message,
            **replay_fields(one, self._replay_start),
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
