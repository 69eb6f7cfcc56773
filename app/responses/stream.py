"""Events of streams of the Responses API.

Follows OpenAI's order: an item is added, gains text, and is done before the next one is added.
Reasoning has the events of a content part, as a message has.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from app.call.chats import Sampled
from app.call.streams import EventWriter
from app.outputs.run_facts import RunFacts
from app.pool.request import ChunkOfJob
from app.responses.answers import ResponsesRequest, item_status, last_ids, text_part
from titopool.errors import TitopoolError
from titopool.wire.messages import Completion

Event = dict[str, Any]
# The middle of the names of the events of a text, by the type of its item.
TEXTS = {
    "reasoning": "reasoning_text", "message": "output_text",
    "function_call": "function_call_arguments",
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
        # The items so far; only the last one may be open.
        self._output: list[dict[str, Any]] = []
        # Of the open item: its type, "" for none, the index of its call, and its text in pieces.
        self._open, self._call_index = "", 0
        self._text: list[str] = []
        # With log-probabilities: all pieces, how many of them deltas have, and the last ids of those.
        self._pieces: list[Completion] = []
        self._num_written, self._last_ids = 0, list[int]()

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[Event]:
        """The events of what items have gained."""
        for _, chunk in chunks:
            self._facts.begin(chunk)
            yield from self._begin_response()
            for _, piece in chunk.pieces:
                self._sampled.add(piece)
                if self._request.texts is not None:
                    self._pieces.append(piece)
                yield from self._write_piece(piece)

    def write_end(self) -> Iterator[Event]:
        """The end of the last item and of the response, which then has all items."""
        yield from self._begin_response()
        if not self._output:
            yield from self._begin("message")
        yield from self._finish(item_status(self._sampled.finish_reason))
        facts = self._facts
        end = self._request.end(
            self._sampled, facts.prompt_ids, facts.num_cached, facts.adapter_version
        )
        name = "completed" if end["status"] == "completed" else "incomplete"
        yield self._event(name, response=self._response | end | {"output": self._shown_output()})

    def write_failure(self, error: TitopoolError, request_id: str) -> Iterator[Event]:
        """The response as far as it came, with the error."""
        # What decodes their tokens may be what has failed.
        self._pieces.clear()
        yield from self._begin_response()
        yield from self._finish("incomplete")
        end = {"status": "failed", **error.to_dict(request_id), "output": self._shown_output()}
        yield self._event("failed", response=self._response | end)

    def _begin_response(self) -> Iterator[Event]:
        if not self._num_events:
            yield self._event("created", response=self._response)
            yield self._event("in_progress", response=self._response)

    def _write_piece(self, piece: Completion) -> Iterator[Event]:
        message: Event = {"content": piece.text} if piece.message is None else piece.message
        if text := message.get("reasoning"):
            yield from self._add("reasoning", text)
        text, error = message.get("content") or "", message.get("parsing_error")
        if text or error:
            yield from self._add("message", text)
        if error:
            self._output[-1]["parsing_error"] = error
        for call in message.get("tool_calls") or ():
            function, index = call.get("function") or {}, call["index"]
            if self._open != "function_call" or self._call_index != index:
                self._call_index = index
                call_id = call.get("id") or f"call_{self._request.turn.call.id}_{index}"
                name = function.get("name") or ""
                yield from self._begin("function_call", call_id=call_id, name=name)
            yield from self._add("function_call", function.get("arguments") or "")

    def _add(self, kind: str, text: str) -> Iterator[Event]:
        """A delta of the open item, or of a new one."""
        if self._open != kind:
            yield from self._begin(kind)
        if text:
            self._text.append(text)
            fields = {"logprobs": self._new_logprobs()} if kind == "message" else {}
            yield self._of_item(f"{TEXTS[kind]}.delta", delta=text, **fields)

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Ends the open item and adds another one."""
        yield from self._finish("completed")
        index, self._open = len(self._output), kind
        self._output.append(self._request.item(index, kind, **fields))
        yield self._event("output_item.added", output_index=index, item=self._output[-1])
        if kind != "function_call":
            yield self._of_item("content_part.added", part=_part(kind, ""))

    def _finish(self, status: str) -> Iterator[Event]:
        """Ends the open item, if there is one."""
        if not (kind := self._open):
            return
        index, item, text = len(self._output) - 1, self._output[-1], "".join(self._text)
        if kind == "function_call":
            item["arguments"] = text
            yield self._of_item(f"{TEXTS[kind]}.done", name=item["name"], arguments=text)
        else:
            item["content"] = [_part(kind, text)]
            (part,) = self._shown(item)["content"]
            done = {name: one for name, one in part.items() if name in ("text", "logprobs")}
            yield self._of_item(f"{TEXTS[kind]}.done", **done)
            (part,) = self._shown(item)["content"]
            yield self._of_item("content_part.done", part=part)
        item["status"] = status
        self._open = ""
        self._text.clear()
        yield self._event("output_item.done", output_index=index, item=self._shown(item))

    def _new_logprobs(self) -> list[Any]:
        """Of the tokens that no delta has yet."""
        pieces = self._pieces[self._num_written :]
        found = list(self._request.logprobs(pieces, self._last_ids))
        self._num_written += len(pieces)
        for piece in pieces:
            self._last_ids = last_ids(self._last_ids, piece)
        return found

    def _shown(self, item: dict[str, Any]) -> dict[str, Any]:
        """An item with its log-probabilities, which are read once."""
        if not self._pieces or not (item["type"] == "message" and item["content"]):
            return item
        part = item["content"][0] | {"logprobs": self._request.logprobs(self._pieces, [])}
        return item | {"content": iter([part])}

    def _shown_output(self) -> Any:
        shown = [self._shown(item) for item in self._output]
        # An iterator where one of them has one (`json_parts`).
        return iter(shown) if self._pieces else shown

    def _of_item(self, event: str, /, **fields: Any) -> Event:
        """An event of the open item, or of its only part."""
        index = len(self._output) - 1
        at = {} if self._open == "function_call" else {"content_index": 0}
        item_id = self._output[-1]["id"]
        return self._event(event, output_index=index, item_id=item_id, **at, **fields)

    def _event(self, event: str, /, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{event}", "sequence_number": number, **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    return text_part(text) if kind == "message" else {"type": "reasoning_text", "text": text}
