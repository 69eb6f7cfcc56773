"""What a streamed job makes, cut into what is new since the last step of the engine."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from titopool.wire.messages import Chunk, Completion, Job
from workers.engine.packing import flat_since, pack_logprobs
from workers.engine.parsing import Parsing
from workers.engine.versions import History


class Sent(NamedTuple):
    """How much of a completion has been sent."""

    num_tokens: int = 0
    num_characters: int = 0


class Stream:
    """Turns vLLM's cumulative outputs into a job's `Chunk`s."""

    def __init__(self, job: Job, parsing: Parsing | None, on_chunk: Callable[[Chunk], None]):
        self._job = job
        self._parsing = parsing
        self._on_chunk = on_chunk
        self._sent: dict[int, Sent] = {}

    def take(self, output: Any, prompt_token_ids: bytes, history: History) -> None:
        """Sends what `output`, a vLLM RequestOutput, has more than the one before.

        Args:
            prompt_token_ids: with images, the expanded prompt; goes with the first chunk.
            history: of the request, up to now.
        """
        is_first = not self._sent
        pieces = [
            (one.index, self._piece(one, history))
            for one in output.outputs
            # It has no place in a stream: the job fails.
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
                )
            )

    def _piece(self, one: Any, history: History) -> Completion:
        sent = self._sent.get(one.index, Sent())
        # What waits behind a stop string that may be coming is not in the text yet.
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
            # Of all tokens so far: who reads the last one needs none of those before.
            weight_versions=history.spans(one.index, len(one.token_ids)),
            text=text,
            stop_reason=one.stop_reason,
            message=message,
        )
