"""Events of streams of `POST /v1/messages`, in the order that Anthropic's clients expect.

A message is a list of blocks; each begins, grows and ends before the next one.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from app.anthropic.answers import block_of, error_of, head, input_of, stop_of, usage_of
from app.call.chats import ChatTurn, Part, Sampled
from app.call.streams import EventWriter
from app.outputs.run_facts import RunFacts, kept_bytes
from app.pool.request import ChunkOfJob
from titopool.errors import TitopoolError

Event = dict[str, Any]
# The type of what a block gains, and the field of the gain, by the kind of part. The arguments of a call
# come whole at its end: clients refuse what is no object of JSON.
GAINS = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text")}


class MessageEvents(EventWriter):
    """Turns the chunks of one turn into Anthropic's event objects."""

    has_names = True

    def __init__(self, turn: ChatTurn):
        self._turn = turn
        self._facts = RunFacts(turn.prompt.token_ids)
        self._sampled = Sampled()
        # The block that grows; None: none does.
        self._open: Part | None = None
        # Of the last block.
        self._index = -1
        self._has_begun = False

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[Event]:
        """The beginning of the message, and what its blocks have gained.

        Raises:
            GenerationFailed: as `Sampled.add`.
        """
        for _, chunk in chunks:
            self._facts.begin(chunk)
            yield from self._begin_message()
            for _, piece in chunk.pieces:
                self._turn.call.hold(kept_bytes(piece))
                for part, text in self._sampled.add(piece):
                    yield from self._gain(part, text)

    def write_end(self) -> Iterator[Event]:
        """The end of the last block and of the message."""
        yield from self._begin_message()
        if not self._sampled.parts:
            yield from self._gain(Part("content"), "")
        yield from self._close()
        turn, sampled, prompt_ids = self._turn, self._sampled, self._facts.prompt_ids
        stop_reason, stop_sequence = stop_of(turn, sampled, len(prompt_ids))
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": usage_of(len(prompt_ids), sampled.num_tokens, self._facts.num_cached),
            **sampled.fields(turn, prompt_ids, self._facts.adapter_version),
        }
        yield {"type": "message_stop"}

    def write_failure(self, error: TitopoolError, request_id: str) -> Iterator[Event]:
        """The error in Anthropic's shape."""
        yield error_of(error.to_dict(request_id), error.status)

    def _begin_message(self) -> Iterator[Event]:
        if self._has_begun:
            return
        self._has_begun = True
        usage = usage_of(len(self._facts.prompt_ids), 0, self._facts.num_cached)
        message = head(self._turn) | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message | {"usage": usage}}

    def _gain(self, part: Part, text: str) -> Iterator[Event]:
        """What a part has gained; before that, the end of the one before and its own beginning."""
        if part is not self._open:
            yield from self._close()
            self._open, self._index = part, self._index + 1
            begun = Part(part.kind, part.number, part.call_id, part.name)
            block = block_of(self._turn, begun)
            if part.kind == "reasoning":
                block["signature"] = ""
            yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if text and part.kind in GAINS:
            yield self._delta(*GAINS[part.kind], text)

    def _close(self) -> Iterator[Event]:
        """Ends the block that grows."""
        if (part := self._open) is None:
            return
        if part.kind == "reasoning":
            yield self._delta("signature_delta", "signature", self._turn.call.id)
        elif part.kind == "call":
            given = orjson.dumps(input_of(part)).decode()
            yield self._delta("input_json_delta", "partial_json", given)
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, kind: str, field: str, value: str) -> Event:
        delta = {"type": kind, field: value}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
