"""Sends the tokens of streamed completions while vLLM handles a step of its engine.

vLLM would make an output for each completion and step, and wake a task for it: 30 µs of the worker's
event loop, which then limits 256 streams to 0.4 of the tokens of whole answers. Here the tokens of a
completion are sent by the function that would make that output, some tokens at a time. vLLM makes the
last output, which has what only an ended completion has.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from titopool.errors import GenerationFailed
from workers.engine.outputs.completions import Stream

logger = logging.getLogger(__name__)

# From so many streamed completions on, the greatest number of tokens in a chunk.
INTERVALS = ((512, 4), (128, 2), (0, 1))


class OpenStreams:
    """The streams in flight of one engine, by vLLM's request id."""

    def __init__(self, interval: int):
        """`interval`: the setting `stream_interval`."""
        self._setting = interval
        self._streams: dict[str, Stream] = {}
        self._num_completions = 0
        # Tokens of a chunk, after the first two.
        self.interval = 1
        self._num_tapped = 0

    def tap(self, output_processor: Any) -> None:
        """Lets vLLM's OutputProcessor send the tokens of requests that are open here."""
        add_request = output_processor.add_request

        def add_and_tap(request: Any, *arguments: Any, **named: Any) -> None:
            add_request(request, *arguments, **named)
            stream = self._streams.get(request.external_req_id)
            if stream is not None:
                state = output_processor.request_states[request.request_id]
                state.make_request_output = self._sender(stream, state)

        output_processor.add_request = add_and_tap

    @contextmanager
    def open(self, request_id: str, stream: Stream | None) -> Iterator[None]:
        """Within the block, the tokens of this request are sent; None: nothing is streamed."""
        if stream is None:
            yield
            return
        self._streams[request_id] = stream
        self._add(1)
        try:
            yield
        finally:
            del self._streams[request_id]
            self._add(-1)

    def _add(self, num_completions: int) -> None:
        self._num_completions += num_completions
        self.interval = self._setting or next(
            interval for least, interval in INTERVALS if self._num_completions >= least
        )

    def _wanted(self, stream: Stream, num_sent: int, turn: int) -> int:
        """The tokens of a completion's next chunk.

        The first one has one. The second one may be short, so that not all streams send at the same
        steps. Some of vLLM's parsers take one token at a time, and lose what comes with another.
        """
        if num_sent == 0 or stream.is_parsed:
            return 1
        return 1 + turn % self.interval if num_sent == 1 else self.interval

    def _sender(self, stream: Stream, state: Any) -> Callable[..., Any]:
        make_output, detokenizer = state.make_request_output, state.detokenizer
        self._num_tapped += 1
        turn = self._num_tapped

        def send_or_end(
            new_token_ids: Any, pooling_output: Any, finish_reason: Any, *rest: Any, **named: Any
        ) -> Any:
            if finish_reason is not None:
                # Else the state would be part of a cycle, and stay until all garbage is collected.
                del state.make_request_output
                return make_output(new_token_ids, pooling_output, finish_reason, *rest, **named)
            num_sent = stream.num_sent
            if detokenizer.num_output_tokens() - num_sent >= self._wanted(stream, num_sent, turn):
                try:
                    stream.send_tokens(state)
                except Exception:
                    # Not through vLLM's handler of outputs, which would end with it.
                    logger.exception("a chunk of a stream could not be made")
                    text = "the worker could not make a chunk of the stream; its log has the reason"
                    state.queue.put(GenerationFailed(text))
            return None

        return send_or_end
