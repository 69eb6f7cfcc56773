"""Which version of the weights made which tokens of a completion, also across updates.

Each completion is a request of vLLM's. No work is done per token. While generation is paused for an
update, the tokens of each request in flight are counted; later tokens belong to the next version.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from titopool.wire.messages import Job, owned_id

# The number of tokens of each request, by its id.
Progress = Mapping[str, int]
Span = tuple[int, int]


class History:
    """The versions that have served during a request, and the oldest whose keys and values it reads."""

    def __init__(self, version: int):
        self._last_version = self._kv_from = version
        # For each earlier version: the request's tokens when it was replaced, and its `kv_from`.
        self._ends: list[tuple[int, int, int]] = []

    def end(
        self, version: int, num_tokens: int, next_version: int, *, keeps_keys: bool = False
    ) -> None:
        """`next_version` replaces `version` when the request has `num_tokens`."""
        self._ends.append((version, num_tokens, self._kv_from))
        self._last_version = next_version
        if not keeps_keys:
            # The request computes its keys and values again.
            self._kv_from = next_version

    def spans(self, num_tokens: int) -> list[Span]:
        """`[(version, first token)]` of the completion, which has `num_tokens` in all."""
        return [(version, begin) for version, begin, _ in self._parts(num_tokens)]

    def kv_from(self, num_tokens: int) -> list[int]:
        """Of each span, the oldest version whose keys its tokens may have read; [] if those are its own."""
        parts = self._parts(num_tokens)
        if all(version == kv_from for version, _, kv_from in parts):
            return []
        return [kv_from for _, _, kv_from in parts]

    def _parts(self, num_tokens: int) -> list[tuple[int, int, int]]:
        parts: list[tuple[int, int, int]] = []
        begin = 0
        for version, count, kv_from in self._ends:
            end = min(count, num_tokens)
            if end > begin:
                parts.append((version, begin, kv_from))
                begin = end
        if begin < num_tokens or not parts:
            parts.append((self._last_version, begin, self._kv_from))
        return parts


class Versions:
    """The version that serves, and the histories of requests that began with another one."""

    def __init__(self) -> None:
        self.current = 0
        # How often an update or a pause has aborted the requests in flight.
        self.num_aborts = 0
        self._num_requests = 0
        self.open: set[str] = set()
        # Open requests that bring a prompt's log-probabilities, and those that are aborted for `keep_keys`.
        self._scoring: set[str] = set()
        self.restarting: set[str] = set()
        # The clients' own ids of open requests that have one, and the names of their keys.
        self._client_ids: dict[str, str] = {}
        self._key_names: dict[str, str] = {}
        self._histories: dict[str, History] = {}
        # How often keys and values of earlier weights have stayed in the cache, and until the weights
        # change the requests that may read them.
        self._num_kept = 0
        self._keeping: set[str] = set()
        # The open jobs by the order of their coming, each with what stops its completions that have
        # not started, and whether all of them wait.
        self._jobs: dict[int, tuple[Job, Callable[[], None], bool]] = {}
        self._num_jobs = 0

    @contextmanager
    def job(
        self, job: Job, stop: Callable[[], None], *, is_waiting: bool = False
    ) -> Iterator[None]:
        """A job counts as open within the block; `stop` keeps its further completions from starting.

        Args:
            is_waiting: whether the engine has nothing of it yet.
        """
        self._num_jobs += 1
        number = self._num_jobs
        self._jobs[number] = (job, stop, is_waiting)
        try:
            yield
        finally:
            del self._jobs[number]

    @property
    def num_jobs(self) -> int:
        """Open jobs."""
        return len(self._jobs)

    def stop_jobs(self, client_ids: Collection[str] | None, *, waiting: bool = True) -> int:
        """Stops the open jobs that are named in these ids, or all; returns how many.

        Args:
            waiting: also those of which the engine has nothing yet.
        """
        stopped = [
            stop
            for job, stop, is_waiting in self._jobs.values()
            if (waiting or not is_waiting)
            and (client_ids is None or (job.client_id and job.is_named_in(client_ids)))
        ]
        for stop in stopped:
            stop()
        # So that completions which the engine aborts then count as aborted on purpose.
        self.num_aborts += 1
        return len(stopped)

    @contextmanager
    def request(
        self,
        job_id: int,
        client_id: str = "",
        key_name: str = "",
        *,
        is_scoring: bool = False,
    ) -> Iterator[str]:
        """A unique id for a completion's request, which counts as open within the block.

        Job ids are unique for one front end only. `client_id` need not be unique.

        Args:
            is_scoring: whether it brings the prompt's log-probabilities.
        """
        self._num_requests += 1
        request_id = f"{job_id}-{self._num_requests}"
        self.open.add(request_id)
        if is_scoring:
            self._scoring.add(request_id)
        if client_id:
            self._client_ids[request_id] = client_id
            self._key_names[request_id] = key_name
        try:
            yield request_id
        except BaseException:
            self._histories.pop(request_id, None)
            raise
        finally:
            self.open.discard(request_id)
            self._scoring.discard(request_id)
            self.restarting.discard(request_id)
            self._client_ids.pop(request_id, None)
            self._key_names.pop(request_id, None)

    def named(self, client_ids: Collection[str]) -> list[str]:
        """The open requests to which clients gave one of these ids, or `owned_id` of one."""
        wanted = set(client_ids)
        return [
            request_id
            for request_id, name in self._client_ids.items()
            if name in wanted or owned_id(self._key_names[request_id], name) in wanted
        ]

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

    def keep_keys(self, prefilling: Collection[str]) -> list[str]:
        """Keys and values that are cached now are read by the requests that are open now, only.

        Generation stands, and other weights follow, or the same ones if their update fails.

        Args:
            prefilling: requests whose prompts the engine has not computed.

        Returns:
            Requests that must be aborted: a part of their prompt's log-probabilities would be of
            earlier weights. They begin again.
        """
        self._num_kept += 1
        self._keeping = set(self.open)
        unscored = self._scoring.intersection(prefilling)
        self.restarting |= unscored
        return [*unscored]

    def clear_keys(self) -> None:
        """All requests compute their keys and values again."""
        self._keeping = set()

    def cache_salt(self, salt: str | None) -> str | None:
        """vLLM's `cache_salt` of a request that begins now: it finds nothing that `keep_keys` set apart.

        Args:
            salt: the client's.
        """
        if salt is not None:
            return f"{self._num_kept}:{salt}"
        return str(self._num_kept) if self._num_kept else None

    def switch(self, version: int, progress: Progress) -> None:
        """Serves `version` from now on; `progress` was counted just before."""
        keeping, self._keeping = self._keeping, set()
        # Those that the engine does not have yet may read kept keys, too.
        for request_id in progress.keys() | keeping:
            if request_id not in self.open:
                # It ended after the count, so nothing would remove its history.
                continue
            history = self._histories.setdefault(request_id, History(self.current))
            num_tokens = progress.get(request_id, 0)
            history.end(self.current, num_tokens, version, keeps_keys=request_id in keeping)
        self.current = version
