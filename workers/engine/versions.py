"""Which version of the weights made which tokens of a request, also across updates.

No work is done per token. While generation is paused for an update, the tokens of each request in
flight are counted; later tokens belong to the next version.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

# For each request id: the number of tokens of each unfinished completion, by index.
Progress = Mapping[str, Mapping[int, int]]
Span = tuple[int, int]


class History:
    """The versions that have served during a request."""

    def __init__(self, last_version: int):
        self._last_version = last_version
        # For each earlier version: tokens of each unfinished completion when it was replaced.
        self._ends: list[tuple[int, Mapping[int, int]]] = []

    def end(self, version: int, num_tokens: Mapping[int, int], next_version: int) -> None:
        """`next_version` replaces `version` when the request has `num_tokens`."""
        self._ends.append((version, num_tokens))
        self._last_version = next_version

    def spans(self, index: int, num_tokens: int) -> list[Span]:
        """`[(version, first token)]` of completion `index`, which has `num_tokens` in all."""
        spans: list[Span] = []
        begin = 0
        for version, counts in self._ends:
            # A completion without a count had ended before.
            end = min(counts.get(index, num_tokens), num_tokens)
            if end > begin:
                spans.append((version, begin))
                begin = end
        if begin < num_tokens or not spans:
            spans.append((self._last_version, begin))
        return spans


class Versions:
    """The version that serves, and the histories of requests that began with another one."""

    def __init__(self) -> None:
        self.current = 0
        # How often an update or a pause has aborted the requests in flight.
        self.num_aborts = 0
        self._num_requests = 0
        self.open: set[str] = set()
        # The clients' own ids of open requests that have one.
        self._client_ids: dict[str, str] = {}
        self._histories: dict[str, History] = {}

    @contextmanager
    def request(self, job_id: int, client_id: str = "") -> Iterator[str]:
        """A unique id for a request, which counts as open within the block.

        Job ids are unique for one front end only. `client_id` need not be unique.
        """
        self._num_requests += 1
        request_id = f"{job_id}-{self._num_requests}"
        self.open.add(request_id)
        if client_id:
            self._client_ids[request_id] = client_id
        try:
            yield request_id
        except BaseException:
            self._histories.pop(request_id, None)
            raise
        finally:
            self.open.discard(request_id)
            self._client_ids.pop(request_id, None)

    def named(self, client_ids: Collection[str]) -> list[str]:
        """The open requests to which clients gave one of these ids."""
        return list(self.client_ids_of(client_ids))

    def client_ids_of(self, client_ids: Collection[str]) -> dict[str, str]:
        """The open requests to which clients gave one of these ids, each with the id."""
        wanted = set(client_ids)
        return {request_id: name for request_id, name in self._client_ids.items() if name in wanted}

    def history(self, request_id: str) -> History:
        """The history of a request so far."""
        return self._histories.get(request_id) or History(self.current)

    def take(self, request_id: str) -> History:
        """The history of a request that has ended; removes it."""
        return self._histories.pop(request_id, None) or History(self.current)

    def switch(self, version: int, progress: Progress) -> None:
        """Serves `version` from now on; `progress` was counted just before."""
        for request_id, counts in progress.items():
            if request_id not in self.open:
                # It ended after the count, so nothing would remove its history.
                continue
            history = self._histories.setdefault(request_id, History(self.current))
            history.end(self.current, counts, version)
        self.current = version
