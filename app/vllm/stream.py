"""Events of streams of /inference/v1/generate, as vLLM's server sends them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from app.call.streams import EventWriter
from app.outputs.run_facts import RunFacts
from app.outputs.usage import usage
from app.pool.request import ChunkOfJob
from app.route.fields import StreamOptions
from app.vllm.answers import TokensRequest
from titopool.wire.messages import Completion


class TokensEvents(EventWriter):
    """Turns the chunks of one request into event objects."""

    def __init__(self, request: TokensRequest):
        self._request = request
        options = request.fields.stream_options or StreamOptions()
        self._has_usage = options.include_usage
        self._has_running_usage = options.include_usage and options.continuous_usage_stats
        self._facts = RunFacts(request.prompt.token_ids)
        # In the first event only.
        self._shows_prompt = request.fields.shows_prompt
        # By the choice's index.
        self._num_tokens: defaultdict[int, int] = defaultdict(int)

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[dict[str, Any]]:
        """One event for each piece of a choice; the first has the prompt's ids if asked for."""
        for _, chunk in chunks:
            self._facts.begin(chunk)
            for index, piece in chunk.pieces:
                if piece.token_ids or piece.finish_reason:
                    yield self._event(index, piece)

    def _event(self, index: int, piece: Completion) -> dict[str, Any]:
        self._num_tokens[index] += len(piece.token_ids) // 4
        num_tokens = self._num_tokens[index]
        choice = self._request.choice(index, piece, self._facts.adapter_version, num_tokens)
        total = self._usage(num_tokens) if self._has_running_usage else None
        # A trainer's part of the last piece is long, and is written in parts.
        is_long = piece.routed_experts is not None or piece.sampling_mask is not None
        choices = iter([choice]) if is_long else [choice]
        event = self._request.head() | {"choices": choices, "usage": total}
        if self._shows_prompt:
            self._shows_prompt = False
            event |= self._request.prompt_fields(self._facts.prompt_ids, self._facts.image_ranges)
        return event

    def write_end(self) -> Iterator[dict[str, Any]]:
        """The event with the usage, if the client requests it."""
        if self._has_usage:
            total = self._usage(sum(self._num_tokens.values()))
            yield self._request.head() | {"choices": [], "usage": total}

    def _usage(self, num_generated: int) -> dict[str, Any]:
        return usage(len(self._facts.prompt_ids), num_generated, self._facts.num_cached)
