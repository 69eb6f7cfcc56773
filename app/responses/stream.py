"""Events of streams of the Responses API.

Follows OpenAI's order: an item is added, gains text, and is done before the next one is added.
Reasoning has the events of a content part, as a message has.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from app.call.chats import Part, Sampled
from app.call.streams import EventWriter
from app.outputs.run_facts import RunFacts, kept_bytes
from app.pool.request import ChunkOfJob
from app.responses.answers import (
    ItemStatus,
    ResponsesRequest,
    content_of,
    item_status,
    last_ids,
)
from titopool.errors import TitopoolError
from titopool.wire.messages import Completion

Event = dict[str, Any]
# The middle of the names of the events of a text, by the kind of part.
TEXTS = {
    "reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments",
}  # fmt: skip


class ResponseEvents(EventWriter):
    """Turns the chunks of one request into the events of its response."""

    has_names = True

    def __init__(self, request: ResponsesRequest):
        self._request = request
        self._response = request.head()
        self._facts = RunFacts(request.turn.prompt.token_ids)
        self._sampled = Sampled()
        self._num_events = 0
        # The part whose item is open, and the statuses of the items before.
        self._open: Part | None = None
        self._ended: list[ItemStatus] = []
        # With log-probabilities: all pieces, how many of them deltas have, and the last ids of those.
        self._pieces: list[Completion] = []
        self._num_written, self._last_ids = 0, list[int]()

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[Event]:
        """The events of what items have gained.

        Raises:
            GenerationFailed: as `Sampled.add`.
        """
        for _, chunk in chunks:
            self._facts.begin(chunk)
            yield from self._begin_response()
            for _, piece in chunk.pieces:
                hold = self._request.turn.call.hold
                hold(kept_bytes(piece))
                if self._request.texts is not None:
                    hold(piece.num_bytes)
                    self._pieces.append(piece)
                for part, text in self._sampled.add(piece):
                    yield from self._gain(part, text)

    def write_end(self) -> Iterator[Event]:
        """The end of the last item and of the response, which then has all items."""
        yield from self._begin_response()
        sampled, facts = self._sampled, self._facts
        if not sampled.parts:
            sampled.parts.append(Part("content"))
            yield from self._gain(sampled.parts[0], "")
        yield from self._finish(item_status(sampled.finish_reason))
        end = self._request.end(sampled, facts.prompt_ids, facts.num_cached, facts.adapter_version)
        name = "completed" if end["status"] == "completed" else "incomplete"
        yield self._event(name, response=self._response | end | {"output": self._output()})

    def write_failure(self, error: TitopoolError, request_id: str) -> Iterator[Event]:
        """The response as far as it came, with the error."""
        # What decodes their tokens may be what has failed.
        self._pieces.clear()
        yield from self._begin_response()
        yield from self._finish("incomplete")
        end = {"status": "failed", **error.to_dict(request_id), "output": self._output()}
        yield self._event("failed", response=self._response | end)

    def _begin_response(self) -> Iterator[Event]:
        if not self._num_events:
            yield self._event("created", response=self._response)
            yield self._event("in_progress", response=self._response)

    def _gain(self, part: Part, text: str) -> Iterator[Event]:
        """What a part has gained; before that, the end of the one before and its own beginning."""
        if part is not self._open:
            yield from self._finish("completed")
            self._open = part
            item = self._request.item(len(self._ended), part, "in_progress")
            yield self._event("output_item.added", output_index=len(self._ended), item=item)
            if part.kind != "call":
                yield self._of_item("content_part.added", part=content_of(Part(part.kind)))
        if text:
            fields = {"logprobs": self._new_logprobs()} if part.kind == "content" else {}
            yield self._of_item(f"{TEXTS[part.kind]}.delta", delta=text, **fields)

    def _finish(self, status: ItemStatus) -> Iterator[Event]:
        """Ends the open item, if there is one."""
        if (part := self._open) is None:
            return
        done = f"{TEXTS[part.kind]}.done"
        if part.kind == "call":
            yield self._of_item(done, name=part.name, arguments=part.text)
        else:
            content = content_of(part)
            shown = {name: content[name] for name in ("text", "logprobs") if name in content}
            yield self._of_item(done, **shown)
            yield self._of_item("content_part.done", part=content)
        index, item = len(self._ended), self._request.item(len(self._ended), part, status)
        self._open = None
        self._ended.append(status)
        yield self._event("output_item.done", output_index=index, item=item)

    def _new_logprobs(self) -> list[Any]:
        """Of the tokens that no delta has yet."""
        pieces = self._pieces[self._num_written :]
        found = list(self._request.logprobs(pieces, self._last_ids))
        self._num_written += len(pieces)
        for piece in pieces:
            self._last_ids = last_ids(self._last_ids, piece)
        return found

    def _output(self) -> Iterator[dict[str, Any]]:
        parts = zip(self._sampled.parts, self._ended, strict=False)
        return self._request.output(parts, self._pieces)

    def _of_item(self, event: str, /, **fields: Any) -> Event:
        """An event of the open item, or of its only part."""
        assert self._open is not None
        index = len(self._ended)
        at = {} if self._open.kind == "call" else {"content_index": 0}
        item_id = self._request.item_id(index, self._open)
        return self._event(event, output_index=index, item_id=item_id, **at, **fields)

    def _event(self, event: str, /, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{event}", "sequence_number": number, **fields}
