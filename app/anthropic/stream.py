"""Events of streams of `POST /v1/messages`, in the order that Anthropic's clients expect.

A message is a list of blocks; each begins, grows and ends before the next one.
"""

from collections.abc import Iterator

import orjson

from app.anthropic.answers import block_of, error_of, head, input_of, stop_of, usage_of
from app.call.chats import sampled_fields
from app.call.part_events import Event, PartEvents
from app.outputs.sampled import Part
from titopool.errors import TitopoolError

# The type of what a block gains, and the field of the gain, by the kind of part. The arguments of a call
# come whole at its end: clients refuse what is no object of JSON.
GAINS = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text")}


class MessageEvents(PartEvents):
    """Turns the chunks of one turn into Anthropic's event objects."""

    def begin(self) -> Iterator[Event]:
        usage = usage_of(len(self.facts.prompt_ids), 0, self.facts.num_cached)
        message = head(self.turn) | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message | {"usage": usage}}

    def begin_part(self, part: Part) -> Iterator[Event]:
        block = block_of(self.turn, Part(part.kind, part.number, part.call_id, part.name))
        if part.kind == "reasoning":
            block["signature"] = ""
        yield {"type": "content_block_start", "index": self.num_ended, "content_block": block}

    def grow(self, part: Part, text: str) -> Iterator[Event]:
        if part.kind in GAINS:
            yield self._delta(*GAINS[part.kind], text)

    def end_part(self, part: Part, *, is_last: bool) -> Iterator[Event]:
        if part.kind == "reasoning":
            yield self._delta("signature_delta", "signature", self.turn.call.id)
        elif part.kind == "call":
            given = orjson.dumps(input_of(part)).decode()
            yield self._delta("input_json_delta", "partial_json", given)
        yield {"type": "content_block_stop", "index": self.num_ended}

    def end(self) -> Iterator[Event]:
        turn, sampled, prompt_ids = self.turn, self.sampled, self.facts.prompt_ids
        stop_reason, stop_sequence = stop_of(turn, sampled, len(prompt_ids))
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": usage_of(len(prompt_ids), sampled.num_tokens, self.facts.num_cached),
            **sampled_fields(turn, sampled, prompt_ids, self.facts.adapter_version),
        }
        yield {"type": "message_stop"}

    def write_failure(self, error: TitopoolError, request_id: str) -> Iterator[Event]:
        """The error in Anthropic's shape."""
        yield error_of(error.to_dict(request_id), error.status)

    def _delta(self, kind: str, field: str, value: str) -> Event:
        delta = {"type": kind, field: value}
        return {"type": "content_block_delta", "index": self.num_ended, "delta": delta}
