"""The requests that are in flight in this front end, for `GET /requests`.

A front end knows its own requests only. `app/operators/requests.py` asks all front ends by way of
a worker.
"""

import heapq
import time
import uuid
from collections.abc import Callable, Collection
from typing import NamedTuple

from flask import Flask, Response, g, has_request_context
from flask import request as http_request

from app.pool.request import Request
from titopool.settings.sampling import scored_once
from titopool.wire.messages import ListedRequests, RequestInfo, RequestPhase, owned_id

# Names of workers and ids of jobs that one request shows.
MAX_SHOWN = 16


class InFlight(NamedTuple):
    """Where jobs of a request are."""

    # Of the workers that have them.
    workers: list[str]
    # Whether a worker's engine may run one.
    has_started: bool


class OpenRequest:
    """One HTTP request that was admitted, until its response is written."""

    __slots__ = (
        "began_s", "client", "ended_ids", "id", "is_aborted", "is_writing", "key", "num_ended",
        "on_abort", "pending", "route", "submitted_s", "traceparent",
    )  # fmt: skip

    def __init__(self, name: str, route: str, client: str, key: str):
        """`client` is the address that the connection comes from; `key` the name of its key."""
        self.id, self.route, self.client, self.key = name, route, client, key
        # Monotonic: when it was admitted, and when it had jobs.
        self.began_s = time.monotonic()
        self.submitted_s: float | None = None
        # For its jobs; "": it is not traced.
        self.traceparent = ""
        # Its jobs; None while the body is checked. They may wait for memory before they are submitted.
        self.pending: Request | None = None
        # Jobs that a client has ended before they were submitted: how many, and their ids, which mean
        # no request of another key.
        self.num_ended = 0
        self.ended_ids: set[str] = set()
        self.is_writing = False
        # Whether a client has ended it before it had jobs, and what is called then.
        self.is_aborted = False
        self.on_abort: Callable[[], object] = lambda: None

    @property
    def client_ids(self) -> set[str]:
        """By which workers know its jobs: its own, or those of a body's prompts."""
        return {job.client_id for job in self.pending.jobs} if self.pending else set()

    @property
    def owned_ids(self) -> set[str]:
        """The same, which mean no request of another key."""
        return {owned_id(self.key, name) for name in self.client_ids}

    @property
    def is_held(self) -> bool:
        """Whether its jobs wait for memory."""
        return self.pending is not None and self.submitted_s is None and not self.is_writing

    @property
    def has_ended(self) -> bool:
        """Whether a client has ended all of its jobs before they were submitted."""
        return self.pending is not None and self.num_ended == len(self.pending.jobs)

    def hold(self, pending: Request) -> None:
        """It has jobs now, which are not submitted yet."""
        self.pending = pending
        if self.is_aborted:
            self.end_jobs(None)

    def end_jobs(self, client_ids: Collection[str] | None) -> int:
        """Lets jobs with these ids, None: all, end when they are submitted; returns their number.

        A job whose prompt is scored goes on, as `Pool.end_waiting` has it.
        """
        assert self.pending is not None
        is_scored = scored_once()
        ended = [
            job
            for job in self.pending.jobs
            if (client_ids is None or job.is_named_in(client_ids))
            and not job.is_named_in(self.ended_ids)
            and not is_scored(job)
        ]
        self.ended_ids.update(owned_id(job.key_name, job.client_id) for job in ended)
        self.num_ended += len(ended)
        return len(ended)

    def submit(self, pending: Request) -> None:
        """Its jobs are submitted."""
        self.hold(pending)
        self.submitted_s = time.monotonic()

    def phase(self, where: InFlight) -> RequestPhase:
        """What it does now."""
        pending = self.pending
        if pending is None or self.submitted_s is None:
            if self.is_writing:
                return "writing"
            return "checking" if pending is None else "waiting"
        if pending.is_done:
            return "writing"
        if pending.num_streamed_tokens:
            return "streaming"
        return "running" if where.has_started else "waiting"

    def info(self, where: InFlight) -> RequestInfo:
        """What `GET /requests` shows."""
        pending = self.pending
        return RequestInfo(
            id=self.id,
            job_ids=sorted(self.client_ids - {self.id})[:MAX_SHOWN],
            route=self.route,
            client=self.client,
            key=self.key,
            age_s=time.monotonic() - self.began_s,
            phase=self.phase(where),
            num_prompts=len(pending.jobs) if pending else 0,
            num_completions=sum(job.num_sequences for job in pending.jobs) if pending else 0,
            tokens_in=pending.num_input_tokens if pending else 0,
            tokens_out=pending.num_tokens if pending else 0,
            workers=where.workers[:MAX_SHOWN],
            model=pending.model if pending else "",
            is_aborted=self.is_aborted,
        )


class OpenRequests:
    """The open requests of this front end, oldest first."""

    def __init__(self) -> None:
        # Unique among all front ends.
        self.front_end = uuid.uuid4().hex
        self._open: dict[int, OpenRequest] = {}
        self.find: Callable[[Request], InFlight] = lambda pending: InFlight([], False)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_held(self) -> int:
        """Prompts that wait for memory."""
        return sum(
            len(one.pending.jobs) for one in self._open.values() if one.pending and one.is_held
        )

    def begin(self, name: str, key: str) -> OpenRequest:
        """Adds the current HTTP request; `end_with_response` removes it."""
        environ = http_request.environ
        client = f"{environ.get('REMOTE_ADDR', '')}:{environ.get('REMOTE_PORT', '')}".strip(":")
        one = OpenRequest(name, http_request.path.rstrip("/"), client, key)
        one.traceparent = g.get("traceparent", "")
        self._open[id(one)] = g.open_request = one
        return one

    def end(self, one: OpenRequest) -> None:
        """Removes a request whose response is written."""
        self._open.pop(id(one), None)

    def listed(self, name: str, limit: int) -> ListedRequests:
        """The `limit` oldest requests; `name` is the question's."""
        oldest = heapq.nsmallest(limit, self._open.values(), key=lambda one: one.began_s)
        infos = [
            one.info(self.find(one.pending) if one.pending else InFlight([], False))
            for one in oldest
        ]
        return ListedRequests(name, self.front_end, len(self._open), infos)

    def abort(self, client_ids: Collection[str] | None) -> tuple[int, list[str]]:
        """Ends requests with these ids whose jobs are not submitted yet, once they are.

        Args:
            client_ids: the clients' ids, of any key or as `owned_id` makes them; None: those of all
                requests that have jobs.

        Returns:
            How many there were, and other ids by which workers know jobs of requests with these ids.
        """
        num_ended, others = 0, set()
        ids = client_ids or ()
        for one in self._open.values():
            is_meant = one.id in ids or owned_id(one.key, one.id) in ids
            if one.is_held:
                num_ended += one.end_jobs(None if is_meant else client_ids)
            elif not is_meant:
                continue
            elif one.pending is not None:
                others |= one.owned_ids
            elif not (one.is_writing or one.is_aborted):
                num_ended += 1
                one.is_aborted = True
                one.on_abort()
        return num_ended, sorted(others.difference(ids))


def init_app(app: Flask, requests: OpenRequests) -> None:
    """Removes each admitted request when its response is written."""

    @app.after_request
    def end_with_response(response: Response) -> Response:
        one = current_open_request()
        if one is not None:
            one.is_writing = True
            response.call_on_close(lambda: requests.end(one))
        return response


def current_open_request() -> OpenRequest | None:
    """Of the current HTTP request; None if it was not admitted."""
    return g.get("open_request") if has_request_context() else None
