"""Events of streams of the Responses API.

Follows OpenAI's order: an item is added, gains text, and is done before the next one is added.
Reasoning has the events of a content part, as a message has.
"""

from collections.abc import Iterator
from typing import Any

from app.call.part_events import Event, PartEvents
from app.outputs.sampled import Part
from app.responses.answers import ItemStatus, ResponsesRequest, content_of, item_status, last_ids
from titopool.errors import TitopoolError
from titopool.wire.messages import Completion

# The middle of the names of the events of a text, by the kind of part.
TEXTS = {
    "reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments",
}  # fmt: skip


class ResponseEvents(PartEvents):
    """Turns the chunks of one request into the events of its response."""

    def __init__(self, request: ResponsesRequest):
        super().__init__(request.turn)
        self._request = request
        self._response = request.head()
        self._num_events = 0
        # Of the last item that has ended; those before are complete.
        self._last_status: ItemStatus = "completed"
        # With log-probabilities: all pieces, how many of them deltas have, and the last ids of those.
        self._pieces: list[Completion] = []
        self._num_written, self._last_ids = 0, list[int]()

    def write_failure(self, error: TitopoolError, request_id: str) -> Iterator[Event]:
        """The response as far as it came, with the error."""
        # What decodes their tokens may be what has failed.
        self._pieces.clear()
        if not self._num_events:
            yield from self.begin()
        # So that the last item is incomplete.
        self.sampled.finish_reason = "abort"
        yield from self.finish(is_last=True)
        end = {"status": "failed", **error.to_dict(request_id), "output": self._output()}
        yield self._event("failed", response=self._response | end)

    def hold(self, piece: Completion) -> None:
        super().hold(piece)
        if self._request.texts is not None:
            self.turn.call.hold(piece.num_bytes)
            self._pieces.append(piece)

    def begin(self) -> Iterator[Event]:
        yield self._event("created", response=self._response)
        yield self._event("in_progress", response=self._response)

    def begin_part(self, part: Part) -> Iterator[Event]:
        item = self._request.item(self.num_ended, part, "in_progress")
        yield self._event("output_item.added", output_index=self.num_ended, item=item)
        if part.kind != "call":
            yield self._of_item(part, "content_part.added", part=content_of(Part(part.kind)))

    def grow(self, part: Part, text: str) -> Iterator[Event]:
        fields = {"logprobs": self._new_logprobs()} if part.kind == "content" else {}
        yield self._of_item(part, f"{TEXTS[part.kind]}.delta", delta=text, **fields)

    def end_part(self, part: Part, *, is_last: bool) -> Iterator[Event]:
        done = f"{TEXTS[part.kind]}.done"
        if part.kind == "call":
            yield self._of_item(part, done, name=part.name, arguments=part.text)
        else:
            content = content_of(part)
            shown = {name: content[name] for name in ("text", "logprobs") if name in content}
            yield self._of_item(part, done, **shown)
            yield self._of_item(part, "content_part.done", part=content)
        if is_last:
            self._last_status = item_status(self.sampled.finish_reason)
        item = self._request.item(self.num_ended, part, self._last_status)
        yield self._event("output_item.done", output_index=self.num_ended, item=item)

    def end(self) -> Iterator[Event]:
        """The response with all items."""
        facts = self.facts
        end = self._request.end(
            self.sampled, facts.prompt_ids, facts.num_cached, facts.adapter_version
        )
        name = "completed" if end["status"] == "completed" else "incomplete"
        yield self._event(name, response=self._response | end | {"output": self._output()})

    def _new_logprobs(self) -> list[Any]:
        """Of the tokens that no delta has yet."""
        pieces = self._pieces[self._num_written :]
        found = list(self._request.logprobs(pieces, self._last_ids))
        self._num_written += len(pieces)
        for piece in pieces:
            self._last_ids = last_ids(self._last_ids, piece)
        return found

    def _output(self) -> Iterator[dict[str, Any]]:
        """The items that have ended."""
        parts = self.sampled.parts[: self.num_ended]
        items = (
            (part, "completed" if index < len(parts) else self._last_status)
            for index, part in enumerate(parts, start=1)
        )
        return self._request.output(items, self._pieces)

    def _of_item(self, of: Part, event: str, /, **fields: Any) -> Event:
        """An event of the open item, or of its only part."""
        at = {} if of.kind == "call" else {"content_index": 0}
        item_id = self._request.item_id(self.num_ended, of)
        return self._event(event, output_index=self.num_ended, item_id=item_id, **at, **fields)

    def _event(self, event: str, /, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{event}", "sequence_number": number, **fields}
