"""Events of streams of `POST /v1/messages`, in the order that Anthropic's clients expect.

A message is a list of blocks; each begins, grows and ends before the next one.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from app.anthropic.answers import error_of, head, stop_of, usage_of
from app.call.chats import Sampled, Turn
from app.call.streams import EventWriter
from app.outputs.run_facts import RunFacts
from app.pool.request import ChunkOfJob
from titopool.errors import GenerationFailed, TitopoolError

# A block: its kind, and of a tool's call its number.
Block = tuple[str, int]
Event = dict[str, Any]


class MessageEvents(EventWriter):
    """Turns the chunks of one turn into Anthropic's event objects."""

    has_names = True

    def __init__(self, turn: Turn):
        self._turn = turn
        self._facts = RunFacts(turn.prompt.token_ids)
        self._sampled = Sampled()
        # The block that grows; None: none does.
        self._open: Block | None = None
        self._num_blocks = 0
        self._calls = set[int]()
        self._parsing_error = ""

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[Event]:
        """The beginning of the message, and what its blocks have gained.

        Raises:
            GenerationFailed: a call of a tool goes on after another one has begun.
        """
        for _, chunk in chunks:
            if self._facts.begin(chunk):
                yield self._start()
            for _, piece in chunk.pieces:
                self._sampled.add(piece)
                yield from self._gain(
                    {"content": piece.text} if piece.message is None else piece.message
                )

    def write_end(self) -> Iterator[Event]:
        """The end of the last block and of the message."""
        yield from self._close()
        turn, sampled, prompt_ids = self._turn, self._sampled, self._facts.prompt_ids
        stop_reason, stop_sequence = stop_of(
            turn, sampled, len(prompt_ids), has_calls=bool(self._calls)
        )
        event = {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": usage_of(len(prompt_ids), sampled.num_tokens, self._facts.num_cached),
        }
        if self._parsing_error:
            event["parsing_error"] = self._parsing_error
        yield event | sampled.fields(turn, prompt_ids, self._facts.adapter_version)
        yield {"type": "message_stop"}

    def write_failure(self, error: TitopoolError, request_id: str) -> Iterator[Event]:
        yield error_of(error.to_dict(request_id), error.status)

    def _start(self) -> Event:
        usage = usage_of(len(self._facts.prompt_ids), 0, self._facts.num_cached)
        return {
            "type": "message_start",
            "message": head(self._turn)
            | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage},
        }

    def _gain(self, delta: dict[str, Any]) -> Iterator[Event]:
        """`delta`: what an OpenAI message has gained."""
        self._parsing_error = delta.get("parsing_error") or self._parsing_error
        if thought := delta.get("reasoning"):
            yield from self._open_block(
                ("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""}
            )
            yield self._delta("thinking_delta", "thinking", thought)
        if text := delta.get("content"):
            yield from self._open_block(("text", 0), {"type": "text", "text": ""})
            yield self._delta("text_delta", "text", text)
        for call in delta.get("tool_calls") or ():
            yield from self._gain_call(call)

    def _gain_call(self, call: dict[str, Any]) -> Iterator[Event]:
        number, function = call.get("index") or 0, call.get("function") or {}
        block = ("tool_use", number)
        if self._open != block:
            if number in self._calls:
                raise GenerationFailed(
                    f"expected that a call of a tool ends before the next begins, got more of call {number} "
                    "from the tool call parser; ask without stream, or for one call at a time"
                )
            self._calls.add(number)
            name, identity = function.get("name") or "", call.get("id") or ""
            yield from self._open_block(
                block, {"type": "tool_use", "id": identity, "name": name, "input": {}}
            )
        if arguments := function.get("arguments"):
            yield self._delta("input_json_delta", "partial_json", arguments)

    def _open_block(self, block: Block, content: dict[str, Any]) -> Iterator[Event]:
        """Begins a block, unless it is the one that grows."""
        if self._open == block:
            return
        yield from self._close()
        self._open = block
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": content}
        self._num_blocks += 1

    def _close(self) -> Iterator[Event]:
        """Ends the block that grows."""
        if self._open is None:
            return
        if self._open[0] == "thinking":
            yield self._delta("signature_delta", "signature", self._turn.call.id)
        yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = None

    def _delta(self, kind: str, field: str, value: str) -> Event:
        return {
            "type": "content_block_delta",
            "index": self._num_blocks - 1,
            "delta": {"type": kind, field: value},
        }
