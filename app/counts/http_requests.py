"""Counts each HTTP request by its route, status and error, and measures its times."""

import re
import time
from http import HTTPStatus
from typing import Protocol

from flask import Flask, Response, g, has_app_context, request

from app.counts.families import (
    FIRST_TOKEN_SECONDS,
    INTER_TOKEN_SECONDS,
    REQUEST_BOUNDS,
    REQUEST_SECONDS,
    REQUESTS,
    TOKEN_BOUNDS,
    TOKENS,
)
from app.counts.front_end import FrontEndCounts, observe

# Others, which clients can make up, are counted together.
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
OTHER = "other"
_CODE = re.compile(r"[a-z_]{1,64}")
# Gaps of one size after which they are counted, so that long streams show while they run.
MAX_RUN = 64


class Generation(Protocol):
    """The request to the pool that belongs to an HTTP request (`app/pool/request.py`)."""

    first_token_at: float
    num_prompt_tokens: int
    num_completion_tokens: int


class Pace:
    """Measures the gaps between the chunks of one stream.

    A stream's gaps are mostly alike, so those between the same two bounds are counted together:
    that takes a third of the time.
    """

    __slots__ = ("_high", "_index", "_last", "_low", "_num", "_since", "_values")

    def __init__(self, values: "memoryview[float]"):
        self._values = values
        self._last = self._since = 0.0
        # No gap lies between these.
        self._low, self._high = 1.0, 0.0
        self._index = self._num = 0

    def note(self) -> None:
        """A chunk is about to be sent."""
        now = time.monotonic()
        gap = now - self._last
        if self._low < gap <= self._high and self._num < MAX_RUN:
            self._num += 1
            self._last = now
        else:
            self._change(gap, now)

    def _change(self, gap: float, now: float) -> None:
        self.end()
        if not self._last:
            self._last = self._since = now
            return
        self._last = now
        bounds = TOKEN_BOUNDS
        self._index = next((i for i, bound in enumerate(bounds) if gap <= bound), len(bounds))
        self._low = bounds[self._index - 1] if self._index else -1.0
        self._high = bounds[self._index] if self._index < len(bounds) else float("inf")
        self._num = 1

    def end(self) -> None:
        """Counts what is left; the stream may go on."""
        if self._num:
            self._values[self._index] += self._num
            self._values[-1] += self._last - self._since
        self._num, self._since = 0, self._last


class HttpRecord:
    """One HTTP request, from its head to the end of its answer."""

    __slots__ = ("_begin", "_counts", "_route", "code", "generation", "method", "status")

    def __init__(self, counts: FrontEndCounts, route: str, method: str):
        self._counts = counts
        self._begin = time.monotonic()
        self._route = route
        self.method = method if method in METHODS else OTHER
        self.status = 0
        # Of the error; "": none.
        self.code = ""
        self.generation: Generation | None = None

    def pace(self) -> Pace:
        """Measures a stream of this request."""
        return Pace(self._counts.values(INTER_TOKEN_SECONDS, self._route))

    def end(self) -> None:
        """Counts the request."""
        counts, route = self._counts, self._route
        counts.values(REQUESTS, route, self.method, str(self.status), self.code)[0] += 1
        seconds = time.monotonic() - self._begin
        observe(counts.values(REQUEST_SECONDS, route), REQUEST_BOUNDS, seconds)
        generation = self.generation
        if generation is None:
            return
        if generation.first_token_at:
            until_first = generation.first_token_at - self._begin
            observe(counts.values(FIRST_TOKEN_SECONDS, route), REQUEST_BOUNDS, until_first)
        counts.values(TOKENS, route, "prompt")[0] += generation.num_prompt_tokens
        counts.values(TOKENS, route, "completion")[0] += generation.num_completion_tokens


def init_app(app: Flask, counts: FrontEndCounts) -> None:
    """Counts every request; call it first, so that its time has all other hooks in it."""

    @app.before_request
    def begin() -> None:
        rule = request.url_rule
        g.http_record = HttpRecord(counts, rule.rule if rule else "", request.method)

    @app.after_request
    def plan_end(response: Response) -> Response:
        record = current_record()
        if record is not None:
            record.status = response.status_code
            if record.status >= 400:
                record.code = _code_of(response)
            response.call_on_close(record.end)
        return response


def current_record() -> HttpRecord | None:
    """The record of the current HTTP request; None outside of one, and if nothing is counted."""
    found: HttpRecord | None = g.get("http_record") if has_app_context() else None
    return found


def _code_of(response: Response) -> str:
    """The code in an error's body; else the name of its status."""
    # 499 has no name of HTTP's, but always a code.
    if code := code_in_body(response):
        return code
    return HTTPStatus(response.status_code).phrase.lower().replace(" ", "_")


def code_in_body(response: Response) -> str:
    """The code in an error's body; "" if the body is another."""
    body = response.get_json(silent=True)
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and error.get("code"):
        code = str(error["code"])
        return code if _CODE.fullmatch(code) else OTHER
    return ""
