"""Events of streams of `POST /generate` in SGLang's form, as SGLang's server sends them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from app.call.streams import EventWriter
from app.outputs.run_facts import RunFacts
from app.pool.request import ChunkOfJob
from app.sglang.answers import Gained, SGLangRequest
from app.time_slices import sharing_time
from titopool.wire.messages import ID_BYTES, Completion

# An id, and a tuple of a log-probability, an id and a text with two empty ones, as Python's objects.
ID_OBJECT_BYTES, ENTRY_OBJECT_BYTES = 40, 300


def bytes_kept(piece: Completion) -> int:
    """What the events of a stream keep of a chunk until its end."""
    num_entries = 0 if piece.logprobs is None else len(piece.logprobs.values) // 4
    num_ids = len(piece.token_ids) // ID_BYTES
    return len(piece.text) + ID_OBJECT_BYTES * num_ids + ENTRY_OBJECT_BYTES * num_entries


class SGLangEvents(EventWriter):
    """Turns the chunks of one request into event objects.

    As SGLang's by default, an event has all of its completion so far. A completion's last event has its
    end, so none follow.
    """

    def __init__(self, request: SGLangRequest):
        self._request = request
        # By job.
        self._facts = [RunFacts(one.prompt.token_ids) for one in request.prompts]
        # By the completion's index in the answer.
        self._gained: defaultdict[int, Gained] = defaultdict(Gained)

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[dict[str, Any]]:
        """One event for each completion that has changed, with all that it is by now.

        Raises:
            TitopoolError: the budget has no room for it.
        """
        last: dict[int, tuple[int, Completion]] = {}
        for job, chunk in chunks:
            one, facts = self._request.prompts[job], self._facts[job]
            facts.begin(chunk)
            for index, piece in chunk.pieces:
                if piece.token_ids or piece.text or piece.finish_reason:
                    if error := self._request.call.count_results(bytes_kept(piece)):
                        raise error
                    self._gained[one.start + index].add(self._request, one, piece)
                    last[one.start + index] = job, piece
        for index, (job, piece) in sharing_time(last.items()):
            one, facts = self._request.prompts[job], self._facts[job]
            event = self._gained[index].shown(self._request, one, facts, piece)
            if self._request.is_list:
                event["index"] = index
            yield event
