"""Events of streams whose message is a list of parts: each begins, grows and ends before the next one."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from app.call.chats import ChatTurn
from app.call.streams import EventWriter
from app.outputs.run_facts import RunFacts, kept_bytes
from app.outputs.sampled import Part, Sampled
from app.pool.request import ChunkOfJob
from titopool.errors import GenerationFailed
from titopool.wire.messages import Completion

Event = dict[str, Any]


class PartEvents(EventWriter):
    """Turns the chunks of one turn into the events of its parts."""

    has_names = True

    def __init__(self, turn: ChatTurn):
        self.turn, self.sampled = turn, Sampled()
        self.facts = RunFacts(turn.prompt.token_ids)
        # The part that grows, and how many have ended.
        self.open: Part | None = None
        self.num_ended = 0

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[Event]:
        """The beginning of the message, and what its parts have gained.

        Raises:
            GenerationFailed: a call goes on after another part has begun.
        """
        for _, chunk in chunks:
            if self.facts.begin(chunk):
                yield from self.begin()
            for _, piece in chunk.pieces:
                self.hold(piece)
                for part, text in self.sampled.add(piece):
                    yield from self._gain(part, text)

    def write_end(self) -> Iterator[Event]:
        """The end of the last part and of the message, which has one part at least."""
        if not self.facts.has_begun:
            yield from self.begin()
        if not self.sampled.parts:
            self.sampled.parts.append(Part("content"))
            yield from self._gain(self.sampled.parts[0], "")
        yield from self.finish(is_last=True)
        yield from self.end()

    def _gain(self, part: Part, text: str) -> Iterator[Event]:
        if part is not self.open:
            yield from self.finish()
            if any(part is one for one in self.sampled.parts[: self.num_ended]):
                raise GenerationFailed(
                    f"expected that a call of a tool ends before the next part begins, got more of call "
                    f"{part.number} from the tool call parser; ask without stream"
                )
            self.open = part
            yield from self.begin_part(part)
        if text:
            yield from self.grow(part, text)

    def finish(self, *, is_last: bool = False) -> Iterator[Event]:
        """Ends the part that grows, if one does."""
        if (part := self.open) is not None:
            yield from self.end_part(part, is_last=is_last)
            self.open = None
            self.num_ended += 1

    def hold(self, piece: Completion) -> None:
        """Counts what is kept of a piece."""
        self.turn.call.hold(kept_bytes(piece))

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """The beginning of the message."""

    @abstractmethod
    def begin_part(self, part: Part) -> Iterator[Event]:
        """The beginning of a part, which has no text yet."""

    @abstractmethod
    def grow(self, part: Part, text: str) -> Iterator[Event]:
        """What a part has gained."""

    @abstractmethod
    def end_part(self, part: Part, *, is_last: bool) -> Iterator[Event]:
        """The end of a part; `is_last`: its message ends with it."""

    @abstractmethod
    def end(self) -> Iterator[Event]:
        """The end of the message."""
