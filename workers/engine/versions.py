"""Which weights made which tokens of a request, also across updates.

Nothing is done for a token. While generation stands for an update, the tokens that each open
request has are counted; what comes after is the next version's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# By request id: tokens of each of its sequences, by index, that is not finished.
Progress = Mapping[str, Mapping[int, int]]
Span = tuple[int, int]


class History:
    """The updates that a request has lived through."""

    def __init__(self, last_version: int):
        self._last_version = last_version
        # (version, tokens of each open sequence when it ended).
        self._ends: list[tuple[int, Mapping[int, int]]] = []

    def end(self, version: int, num_tokens: Mapping[int, int], next_version: int) -> None:
        """`version` ends here for this request."""
        self._ends.append((version, num_tokens))
        self._last_version = next_version

    def spans(self, index: int, num_tokens: int) -> list[Span]:
        """`[(version, first token)]` of sequence `index`, which has `num_tokens` in all."""
        spans: list[Span] = []
        begin = 0
        for version, counts in self._ends:
            # A sequence that is not among the open ones had ended before.
            end = min(counts.get(index, num_tokens), num_tokens)
            if end > begin:
                spans.append((version, begin))
                begin = end
        if begin < num_tokens or not spans:
            spans.append((self._last_version, begin))
        return spans


class Versions:
    """The version that serves, and the histories of requests that saw another one."""

    def __init__(self) -> None:
        self.current = 0
        # How often an update or a pause has aborted what was under way.
        self.num_aborts = 0
        self._num_requests = 0
        self.open: set[str] = set()
        self._histories: dict[str, History] = {}

    @contextmanager
    def request(self, job_id: int) -> Iterator[str]:
        """An id for a request, which is open meanwhile; job ids of two front ends may be equal."""
        self._num_requests += 1
        request_id = f"{job_id}-{self._num_requests}"
        self.open.add(request_id)
        try:
            yield request_id
        except BaseException:
            self._histories.pop(request_id, None)
            raise
        finally:
            self.open.discard(request_id)

    def history(self, request_id: str) -> History:
        """The history of a request so far."""
        return self._histories.get(request_id) or History(self.current)

    def take(self, request_id: str) -> History:
        """The history of a request that has ended; it is forgotten here."""
        return self._histories.pop(request_id, None) or History(self.current)

    def switch(self, version: int, progress: Progress) -> None:
        """`version` serves from now on; `progress` is of requests that were open a moment ago."""
        for request_id, counts in progress.items():
            if request_id not in self.open:
                # It ended meanwhile: nobody would take its history.
                continue
            history = self._histories.setdefault(request_id, History(self.current))
            history.end(self.current, counts, version)
        self.current = version
